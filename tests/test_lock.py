"""The lock files install the same files on every machine, from any index."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = {name: (ROOT / name).read_text() for name in ("requirements.lock", "requirements-extras.lock")}
NODE_LOCKS = sorted((ROOT / "tests/clients").glob("*/package-lock.json"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


each_lock = pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)


def read_locked() -> dict[str, list[Requirement]]:
    """Return the entries of both files by name. A package may have one for each range of Python versions."""
    lines = [line for lock in LOCKS.values() for line in lock.splitlines()]
    entries: dict[str, list[Requirement]] = {}
    for line in lines:
        if line[:1].isalnum():
            entry = Requirement(line.removesuffix("\\"))
            entries.setdefault(canonicalize_name(entry.name), []).append(entry)
    return entries


def read_declared() -> list[Requirement]:
    groups = [PROJECT["project"]["dependencies"], PROJECT["build-system"]["requires"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    groups += PROJECT["dependency-groups"].values()
    return [Requirement(line) for group in groups for line in group]


@each_lock
def test_every_line_is_a_pinned_package_a_hash_or_a_comment(lock: str) -> None:
    package = re.compile(r"[A-Za-z0-9._-]+==[^ ]+( ; .+)? \\")
    hash_ = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    comment = re.compile(r" *#.*")
    unexpected = [line for line in lock.splitlines() if not any(p.fullmatch(line) for p in (package, hash_, comment))]

    assert unexpected == []
    assert "://" not in lock


@each_lock
def test_every_package_has_a_hash(lock: str) -> None:
    for name, rest in re.findall(r"^([A-Za-z0-9._-]+)==[^\n]*\n([^\n]*)", lock, flags=re.MULTILINE):
        assert "--hash=sha256:" in rest, name


def test_every_declared_dependency_is_locked_at_an_accepted_version() -> None:
    entries = read_locked()
    for requirement in read_declared():
        for entry in entries[canonicalize_name(requirement.name)]:
            (pin,) = entry.specifier
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement


def test_no_package_is_in_both_files() -> None:
    names = [{line.split("==")[0] for line in lock.splitlines() if line[:1].isalnum()} for lock in LOCKS.values()]

    assert names[0] & names[1] == set()


@pytest.mark.parametrize("path", NODE_LOCKS, ids=lambda path: path.parent.name)
def test_node_lock_names_no_index_and_has_a_hash_for_every_package(path: Path) -> None:
    text = path.read_text()
    installed = [package for folder, package in json.loads(text)["packages"].items() if folder]
    assert "://" not in text
    assert len(installed) > 1
    assert all(package["integrity"].startswith("sha512-") for package in installed)
