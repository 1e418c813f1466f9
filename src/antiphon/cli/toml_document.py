"""Set values in a TOML file and leave every other byte unchanged, including comments.

Lines are edited with regular expressions, which do not cover all of TOML. So the result is parsed and compared with the
expected document. If they differ, the file is not changed.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from antiphon.errors import AntiphonError

Path = tuple[str, ...]
Value = str | int | bool

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ANY_HEADER = re.compile(r"\s*\[")
_ENTRY = re.compile(r"""(\s*["']?([\w-]+)["']?\s*=\s*)("(?:[^"\\]|\\.)*"|'[^']*'|[^#\s"']+)(.*)$""")


class MergeError(AntiphonError):
    """The values cannot be set without risk to the rest of the file."""


def set_values(text: str, path: Path, values: Mapping[str, Value | None]) -> str:
    """Return the document with these values in the table at `path`, () for the top. None removes a value.

    Raises MergeError.
    """
    expected = _apply_values(_parse(text), path, values)
    lines = text.split("\n")
    ending = "\r" if lines[0].endswith("\r") else ""
    for key, value in values.items():
        _set_value(lines, path, key, None if value is None else format_value(value), ending)
    changed = "\n".join(lines)
    try:
        is_correct = tomllib.loads(changed) == expected
    except tomllib.TOMLDecodeError:
        is_correct = False
    if not is_correct:
        table = f"[{'.'.join(path)}]" if path else "the top of the file"
        raise MergeError(f"{', '.join(values)} cannot be set safely in {table}: its syntax is not supported")
    return changed


def format_value(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MergeError(f"it is not valid TOML: {error}") from None


def _apply_values(document: dict[str, Any], path: Path, values: Mapping[str, Value | None]) -> dict[str, Any]:
    """Return the parsed document with the values set."""
    table: Any = document
    for name in path:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise MergeError(f"{'.'.join(path)} is not a table")
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return document


def _set_value(lines: list[str], path: Path, key: str, value: str | None, ending: str) -> None:
    span = _find_table(lines, path)
    if span is None:
        if value is not None:
            _add_table(lines, path, f"{key} = {value}{ending}", ending)
        return
    last = -1
    for index in span:
        entry = _ENTRY.match(lines[index])
        if entry is not None and entry[2] == key:
            lines[index : index + 1] = [] if value is None else [f"{entry[1]}{value}{entry[4]}"]
            return
        if lines[index].strip() and not lines[index].lstrip().startswith("#"):
            last = index
    if value is not None:
        at = last + 1 if last >= 0 else span.start
        new = [f"{key} = {value}{ending}"]
        # An empty line separates a first value from the table or comment that follows it.
        if last < 0 and not path and lines[at].strip():
            new.append(ending)
        lines[at:at] = new


def _find_table(lines: list[str], path: Path) -> range | None:
    """Return the line numbers of a table, without its header."""
    start = 0 if not path else None
    for index, line in enumerate(lines):
        if not _ANY_HEADER.match(line):
            continue
        if start is not None:
            return range(start, index)
        header = _HEADER.match(line)
        if header is not None and _parse_header(header[1]) == path:
            start = index + 1
    return None if start is None else range(start, len(lines))


def _parse_header(header: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in header.split("."))


def _add_table(lines: list[str], path: Path, entry: str, ending: str) -> None:
    while lines and not lines[-1].strip():
        lines.pop()
    if lines:
        lines[-1] = lines[-1].removesuffix("\r") + ending
        lines.append(ending)
    lines += [f"[{'.'.join(path)}]{ending}", entry, ""]
