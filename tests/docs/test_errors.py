"""docs/errors.md lists every error code of the API."""

import re
from pathlib import Path

from antiphon import errors
from antiphon.errors import AntiphonError, ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text("utf-8")


def find_api_errors(base: type[AntiphonError] = AntiphonError) -> list[type[AntiphonError]]:
    """Return the error classes that a client can get, without subclasses in other modules."""
    found = [each for each in base.__subclasses__() if each.__module__ == errors.__name__ and each is not ConfigError]
    return found + [inner for each in found for inner in find_api_errors(each)]


def test_every_error_class_is_listed_with_status_and_type() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `?(\w+)`?", TEXT, flags=re.MULTILINE)
    listed = {(int(status), kind, code) for status, kind, code in rows}
    tree = {(each.status, each.type, each.default_code) for each in find_api_errors() if each.default_code}
    assert tree - listed == set()


def test_every_code_in_the_source_is_listed() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    codes = set(re.findall(r'(?:\bcode=|\bSteerRefused\(|\bmake_failure\([^"]*|\bRunError\()"(\w+)"', source))
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()
