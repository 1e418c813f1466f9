"""Backend kinds, from the entry points of installed packages.

A package registers a kind in the group `antiphon.backends`: the kind's name, and a factory that is called as
`create(name, options, data_dir)`. Antiphon registers its own kinds in the same way.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from antiphon.backends.base import Backend
from antiphon.entry_points import EntryPoint, find_entry_points
from antiphon.errors import ConfigError

GROUP = "antiphon.backends"

Factory = Callable[[str, Mapping[str, Any], Path], Backend]


def kinds() -> list[str]:
    """Return the installed kinds, sorted, without importing them."""
    return sorted({entry.name for entry in find_entry_points(GROUP)})


def create(kind: str, *, name: str, options: Mapping[str, Any], data_dir: Path) -> Backend:
    """Create a backend. `name` is its configured name. Only the module of this kind is imported."""
    entry = _find(kind, where=f"backends.{name}.kind")
    return _load(entry, where=f"backends.{name}.kind")(name, options, data_dir)


def _find(kind: str, *, where: str) -> EntryPoint:
    found = sorted((entry for entry in find_entry_points(GROUP) if entry.name == kind), key=lambda entry: entry.value)
    if not found:
        installed = ", ".join(kinds()) or "none"
        raise ConfigError(f"{where}: no backend of kind {kind!r} is installed; installed are: {installed}")
    if len(found) > 1:
        claims = ", ".join(entry.value for entry in found)
        raise ConfigError(f"{where}: several installed packages provide {kind!r}: {claims}; remove all but one")
    return found[0]


def _load(entry: EntryPoint, *, where: str) -> Factory:
    # The import runs third-party code, which may raise anything. The error names the package.
    try:
        factory = entry.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {_describe(entry)} cannot be loaded: {reason}") from error
    if not callable(factory):
        raise ConfigError(f"{where}: {_describe(entry)} cannot be loaded: it is not callable")
    create_backend: Factory = factory
    return create_backend


def _describe(entry: EntryPoint) -> str:
    return f"the entry point {entry.name} = {entry.value!r}"
