"""The feature table in docs/guides/agents.md: each row names a test of this repository, or says what is missing."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
HEADER = "| feature | openai-agents | pydantic-ai | Antiphon | test |"

_LINK = re.compile(r"\[`?(\w+)`?\]\(([^)#]+\.py)\)")


def read_rows() -> list[list[str]]:
    _, _, rest = PAGE.read_text("utf-8").partition(f"{HEADER}\n")
    table, _, _ = rest.partition("\n\n")
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]


ROWS = read_rows()


def find_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def test_table_has_rows_with_five_columns() -> None:
    assert len(ROWS) >= 40
    assert [row for row in ROWS if len(row) != 5] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_names_tests_or_says_that_the_feature_is_missing(row: list[str]) -> None:
    links = _LINK.findall(row[-1])
    if row[3].startswith("no"):
        assert links == []
        return
    assert links, "a feature that Antiphon has is linked to a test"
    for name, path in links:
        assert name in find_tests((PAGE.parent / path).resolve())
