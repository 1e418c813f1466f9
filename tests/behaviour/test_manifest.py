"""The manifest is complete, cites existing names and tests only, and the generated page is up to date."""

import ast
import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import manifest
from behaviour.surface import LISTED, OWN, SHARED

ROOT = manifest.ROOT
STALE = "docs/behaviour.md is not up to date with tests/behaviour/manifest: run `make format`"


@pytest.mark.parametrize("family", LISTED)
def test_entries_equal_the_names_of_the_reference_lists(family: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("the reference lists are not beside the repository")
    assert set(manifest.names(family)) == LISTED[family]()


@pytest.mark.parametrize("family", OWN)
def test_entries_equal_the_names_of_the_types_in_src(family: str) -> None:
    assert set(manifest.names(family)) == OWN[family]()


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_name_has_one_entry(family: str) -> None:
    assert [name for name, times in Counter(manifest.names(family)).items() if times > 1] == []


def test_every_family_but_one_has_a_reference_list() -> None:
    assert set(manifest.FAMILIES) - set(LISTED) == {"wire"}


def test_every_file_is_a_family() -> None:
    assert {path.stem for path in manifest.DATA.iterdir()} == set(manifest.FAMILIES)


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_entry_has_a_test_and_planned_entry_has_a_note(family: str) -> None:
    entries = list(manifest.entries(family))
    assert [entry.name for entry in entries if entry.state != "planned" and not entry.tests] == []
    assert [entry.name for entry in entries if entry.state == "planned" and not entry.note] == []


@functools.cache
def find_tests(path: Path) -> set[str]:
    """Return the tests in a file, as pytest names them after the file name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


def exists(test: str, collected: Mapping[str, set[str]]) -> bool:
    """Return True if the test was collected, or is in a file that was not collected.

    An id without parameters matches all parameters.
    """
    file, _, name = test.partition("::")
    if file in collected:
        return test in collected[file]
    return name.partition("[")[0] in find_tests(ROOT / file)


@pytest.mark.parametrize("family", manifest.FAMILIES)
def test_every_cited_test_exists(family: str, collected: Mapping[str, set[str]]) -> None:
    cited = {test for entry in manifest.entries(family) for test in entry.tests}
    assert sorted(test for test in cited if not exists(test, collected)) == []


def test_every_behaviour_test_is_cited() -> None:
    cited = {
        test.partition("[")[0]
        for family in manifest.FAMILIES
        for each in manifest.entries(family)
        for test in each.tests
    }
    here = Path(__file__)
    files = (path for path in here.parent.glob("test_*.py") if path != here)
    tests = {f"{path.relative_to(ROOT)}::{name}" for path in files for name in find_tests(path)}
    assert sorted(tests - cited - WHOLE_MANIFEST_TESTS) == []


# These tests compare the whole manifest with the server.
WHOLE_MANIFEST_TESTS = {
    "tests/behaviour/test_endpoints.py::test_implemented_endpoints_equal_the_openapi_document",
    "tests/behaviour/test_events.py::test_no_other_event_is_sent",
    "tests/behaviour/test_parameters.py::test_unknown_parameter_is_reported_in_a_header",
}


def test_complaint_is_cited_with_a_test_that_has_its_id() -> None:
    for entry in manifest.entries("complaints"):
        label = f"_{entry.name[0].lower()}_{entry.name[1:]}_"
        assert entry.state == "planned" or any(label in test for test in entry.tests), entry.name


@pytest.mark.parametrize("family", ["stateless", "contract"])
def test_contract_line_cites_only_tests_that_start_with_its_id(family: str) -> None:
    for entry in manifest.entries(family):
        label = f"::test_{entry.name.lower().replace('.', '_')}_"
        assert entry.state == "planned" or all(label in test for test in entry.tests), entry.name


@pytest.mark.parametrize("family", ["requests", "results", "provider"])
def test_contract_line_cites_only_tests_that_contain_its_id(family: str) -> None:
    for entry in manifest.entries(family):
        label = f"_{entry.name.lower().replace('.', '_')}_"
        assert all(label in test for test in entry.tests), entry.name


def test_agent_complaint_cites_a_test_of_a_reported_case() -> None:
    for entry in manifest.entries("agent_complaints"):
        assert any("::test_pain_agents_" in test for test in entry.tests), entry.name


def test_page_is_generated_from_the_manifest() -> None:
    assert manifest.PAGE.read_text(encoding="utf-8") == manifest.render_page(), STALE


def split_summary() -> list[list[str]]:
    """Return the cells of the summary's rows, without the heading."""
    return [line.split(" | ") for line in manifest.render_summary().partition("|---")[2].splitlines()[1:]]


def test_summary_has_one_row_per_family() -> None:
    assert [row[0] for row in split_summary()] == [f"| {manifest.load(family).title}" for family in manifest.FAMILIES]


def test_summary_counts_every_entry_once() -> None:
    counts = [sum(int(cell) for cell in row[1:5] if cell.strip()) for row in split_summary()]
    assert counts == [len(manifest.names(family)) for family in manifest.FAMILIES]
