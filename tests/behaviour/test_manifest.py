"""The manifest is complete, names only what there is, and the pages made from it are up to date."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

import manifest
from behaviour.surface import LISTED, OWN, SHARED

ROOT = manifest.ROOT
STALE = "is not up to date with tests/behaviour/manifest: run `.venv/bin/python tests/manifest.py`"


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_every_name_of_the_lists_has_an_entry_and_every_entry_is_in_them(family: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("the lists are not beside the repository")
    assert set(manifest.names(family)) == LISTED[family]()


@pytest.mark.parametrize("family", OWN)
def test_every_name_of_our_types_has_an_entry_and_every_entry_is_in_them(family: str) -> None:
    assert set(manifest.names(family)) == OWN[family]()


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_a_name_has_one_entry(family: str) -> None:
    assert [name for name, times in Counter(manifest.names(family)).items() if times > 1] == []


def test_every_file_is_a_family() -> None:
    assert {path.stem for path in manifest.DATA.iterdir()} == set(manifest.FAMILIES)


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_an_entry_has_a_test_and_a_planned_one_a_reason(family: str) -> None:
    entries = list(manifest.entries(family))
    assert [entry.name for entry in entries if entry.state != "planned" and not entry.tests] == []
    assert [entry.name for entry in entries if entry.state == "planned" and not entry.note] == []


@functools.cache
def find_tests(path: Path) -> set[str]:
    """The tests in a file, as pytest names them behind the file's name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def is_there(test: str, collected: set[str]) -> bool:
    """A test that was collected, or one in a file from which nothing was.

    An id without its parameters stands for all of them.
    """
    file, _, name = test.partition("::")
    of_file = {each for each in collected if each.startswith(f"{file}::")}
    if of_file:
        return test in of_file or ("[" not in test and any(each.startswith(f"{test}[") for each in of_file))
    return name.partition("[")[0] in find_tests(ROOT / file)


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_every_test_that_is_named_is_there(family: str, collected: set[str]) -> None:
    named = {test for entry in manifest.entries(family) for test in entry.tests}
    assert sorted(test for test in named if not is_there(test, collected)) == []


def test_every_test_of_a_behaviour_is_named() -> None:
    named = {
        test.partition("[")[0]
        for family in manifest.FAMILIES
        for each in manifest.entries(family)
        for test in each.tests
    }
    here = Path(__file__)
    files = (path for path in here.parent.glob("test_*.py") if path != here)
    tests = {f"{path.relative_to(ROOT)}::{name}" for path in files for name in find_tests(path)}
    assert sorted(tests - named - OF_THE_MANIFEST) == []


# They compare the manifest as a whole with what the server does.
OF_THE_MANIFEST = {
    "tests/behaviour/test_endpoints.py::test_the_implemented_ones_are_those_that_the_document_describes",
    "tests/behaviour/test_events.py::test_nothing_else_is_told",
    "tests/behaviour/test_parameters.py::test_a_parameter_that_nobody_knows_is_told_in_a_header",
}


def test_a_complaint_is_shown_by_a_test_of_its_name() -> None:
    for entry in manifest.entries("complaints"):
        label = f"_{entry.name[0].lower()}_{entry.name[1:]}_"
        assert entry.state == "planned" or any(label in test for test in entry.tests), entry.name


@pytest.mark.parametrize("family", ["stateless", "contract"])
def test_a_line_of_a_contract_is_shown_by_a_test_of_its_name(family: str) -> None:
    for entry in manifest.entries(family):
        label = f"::test_{entry.name.lower().replace('.', '_')}_"
        assert entry.state == "planned" or all(label in test for test in entry.tests), entry.name


@pytest.mark.parametrize("family", ["requests", "results", "provider"])
def test_a_line_is_named_by_its_tests_which_may_show_several(family: str) -> None:
    for entry in manifest.entries(family):
        label = f"_{entry.name.lower().replace('.', '_')}_"
        assert all(label in test for test in entry.tests), entry.name


def test_a_theme_of_complaints_is_shown_by_tests_that_are_named_after_its_cases() -> None:
    for entry in manifest.entries("agent_complaints"):
        assert any("::test_pain_agents_" in test for test in entry.tests), entry.name


def test_the_readme_shows_the_manifest() -> None:
    readme = manifest.README.read_text(encoding="utf-8")
    assert readme == manifest.put_summary(readme), f"README.md {STALE}"


def test_the_page_shows_the_manifest() -> None:
    assert manifest.PAGE.read_text(encoding="utf-8") == manifest.render_page(), f"docs/behaviour.md {STALE}"


def test_markers_are_added_to_a_readme_without_them() -> None:
    added = manifest.put_summary("# Title\n")
    assert added == f"# Title\n\n{manifest.BEGIN}{manifest.render_summary()}{manifest.END}\n"
    assert manifest.put_summary(added) == added
