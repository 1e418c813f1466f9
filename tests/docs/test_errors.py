"""docs/errors.md lists every error that a client can get."""

import re
from pathlib import Path

from antiphon import errors
from antiphon.errors import AntiphonError, ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text("utf-8")


def wire_errors(base: type[AntiphonError] = AntiphonError) -> list[type[AntiphonError]]:
    """All of the tree that reach a client; other modules may derive some for themselves."""
    found = [each for each in base.__subclasses__() if each.__module__ == errors.__name__ and each is not ConfigError]
    return found + [inner for each in found for inner in wire_errors(each)]


def test_every_error_of_the_tree_is_listed_with_its_status_and_type() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `?(\w+)`?", TEXT, flags=re.MULTILINE)
    listed = {(int(status), kind, code) for status, kind, code in rows}
    tree = {(each.status, each.type, each.default_code) for each in wire_errors() if each.default_code}
    assert tree - listed == set()


def test_every_code_in_the_source_is_listed() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    codes = set(re.findall(r'\bcode="(\w+)"', source))
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()
