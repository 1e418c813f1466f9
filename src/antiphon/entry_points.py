"""Entry points and versions of installed packages.

`importlib.metadata` takes a tenth of the start of a server. It is imported only if a package may be installed in
another way than as a folder of metadata on `sys.path`.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

_SUFFIXES = (".dist-info", ".egg-info")
_SEPARATORS = re.compile("[-_.]+")


class EntryPoint(NamedTuple):
    """A name in a group, and its object as `module:attribute`."""

    name: str
    value: str

    def load(self) -> Any:
        """Import the module and return the object. Raises what the import raises."""
        module, _, attributes = self.value.partition("[")[0].partition(":")
        found: Any = import_module(module.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            found = getattr(found, attribute)
        return found


def find_entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, in the order of the packages on `sys.path`."""
    if not _are_packages_in_folders():
        from importlib import metadata

        return [EntryPoint(point.name, point.value) for point in metadata.entry_points(group=group)]
    found: dict[str, list[EntryPoint]] = {}
    for package, folder in _list_packages():
        if package not in found:  # the first one on the path hides the others
            found[package] = _read_entry_points(folder, group)
    return [point for points in found.values() for point in points]


def find_version(package: str) -> str:
    """Return the version of an installed package. Raises PackageNotFoundError."""
    if _are_packages_in_folders():
        for name, folder in _list_packages():
            stem = folder.rpartition(os.sep)[2].removesuffix(".dist-info")
            if name == package and folder.endswith(".dist-info") and "-" in stem:
                return stem.partition("-")[2]
    from importlib import metadata

    return metadata.version(package)


def find_own_version() -> str:
    """Return the version of Antiphon, or `unknown` if it is not installed as a package."""
    try:
        return find_version("antiphon")
    except ModuleNotFoundError:  # a PackageNotFoundError
        return "unknown"


def _are_packages_in_folders() -> bool:
    """Return True if no archive, egg or import hook can provide a package."""
    if any(finder is not PathFinder and hasattr(finder, "find_distributions") for finder in sys.meta_path):
        return False
    return not any(path.endswith(".egg") or Path(path).is_file() for path in sys.path)


def _list_packages() -> Iterator[tuple[str, str]]:
    """Yield the normalized name and the metadata folder of every installed package."""
    for path in sys.path:
        try:
            with os.scandir(path or ".") as entries:
                names = [entry.name for entry in entries if entry.name.endswith(_SUFFIXES)]
        except OSError:
            continue
        for name in names:
            package = name.rpartition(".")[0].partition("-")[0]
            yield _SEPARATORS.sub("_", package).lower(), f"{path or '.'}{os.sep}{name}"


def _read_entry_points(folder: str, group: str) -> list[EntryPoint]:
    found: list[EntryPoint] = []
    try:
        # There may be hundreds of these files: a Path for each would take most of the time.
        with io.FileIO(f"{folder}{os.sep}entry_points.txt") as file:
            content = file.read()
    except OSError:
        return found
    if group.encode() not in content:
        return found
    section = ""
    for line in map(str.strip, content.decode(errors="replace").splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == group and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.append(EntryPoint(name.strip(), value.strip()))
    return found
