"""The search for entry points and versions of installed packages, compared with that of the standard library."""

import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from antiphon.entry_points import EntryPoint, find_entry_points, find_own_version, find_version

GROUP = "antiphon.test_group"


def install(folder: Path, name: str, version: str, entry_points: str | None) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points is not None:
        (info / "entry_points.txt").write_text(entry_points)


def find_all() -> list[EntryPoint]:
    return sorted(find_entry_points(GROUP))


def find_with_standard_library() -> list[EntryPoint]:
    return sorted(EntryPoint(each.name, each.value) for each in metadata.entry_points(group=GROUP))


def test_entry_points_of_a_group_are_read_from_all_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# comment", "[other.group]", "x = other:x", "", f"[{GROUP}]", "# comment", " a=one.two : make "]
    install(tmp_path, "first", "1.0", "\n".join([*lines, "b = three:Type.method [extra]"]))
    install(tmp_path, "second", "2.0", f"[{GROUP}]\na = second\n")
    install(tmp_path, "third", "1.0", None)
    monkeypatch.syspath_prepend(tmp_path)
    assert [each.name for each in find_all()] == ["a", "a", "b"]
    assert find_all() == find_with_standard_library()


def test_first_package_of_a_name_hides_the_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "late", "some.name", "1.0", f"[{GROUP}]\nold = old:make\n")
    install(tmp_path / "early", "Some_Name", "2.0", f"[{GROUP}]\nnew = new:make\n")
    monkeypatch.syspath_prepend(tmp_path / "late")
    monkeypatch.syspath_prepend(tmp_path / "early")
    assert find_all() == [EntryPoint("new", "new:make")] == find_with_standard_library()


def test_packages_in_an_archive_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as archive:
        archive.writestr("packed-3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 3.1\n")
        archive.writestr("packed-3.1.dist-info/entry_points.txt", f"[{GROUP}]\npacked = packed:make\n")
    monkeypatch.syspath_prepend(tmp_path / "bundle.zip")
    assert find_all() == [EntryPoint("packed", "packed:make")]
    assert find_version("packed") == "3.1"


def test_packages_of_an_import_hook_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook(metadata.DistributionFinder):
        def find_distributions(self, context: object = None) -> list[metadata.Distribution]:
            return [Hooked()]

    class Hooked(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            files = {"METADATA": "Name: hooked\nVersion: 4.2\n", "entry_points.txt": f"[{GROUP}]\nhooked = h:make\n"}
            return files.get(filename)

        def locate_file(self, path: object) -> Path:
            raise FileNotFoundError

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    assert find_all() == [EntryPoint("hooked", "h:make")]


def test_entry_point_loads_a_module_or_an_attribute_of_it() -> None:
    assert EntryPoint("module", "os.path").load() is sys.modules["os.path"]
    assert EntryPoint("attribute", "pathlib:Path.home [extra]").load() == Path.home
    with pytest.raises(AttributeError):
        EntryPoint("missing", "pathlib:missing").load()


def test_version_is_that_of_the_installed_package() -> None:
    assert find_version("antiphon") == metadata.version("antiphon")
    with pytest.raises(metadata.PackageNotFoundError):
        find_version("no_such_package")


def test_own_version_is_unknown_without_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_own_version() == metadata.version("antiphon")
    monkeypatch.setattr(sys, "path", [])
    assert find_own_version() == "unknown"
