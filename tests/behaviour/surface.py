"""The names that the manifest must have: from the lists beside the repository, or from the types in src."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from antiphon.protocol import request, response
from antiphon.protocol.codec import EVENTS
from antiphon.protocol.content import ANNOTATIONS, PARTS
from antiphon.protocol.items import ITEMS, OutputItem
from antiphon.protocol.tools import CHOICE_WORDS, CHOICES, TOOLS

SHARED = Path(__file__).parents[3] / "shared"
# Parameters that are not in the list: those that Codex sends, and those of a WebSocket message.
OUR_PARAMETERS = {"client_metadata", "type", "generate", "stream_id"}
# The SDK does not have it in the union from which the list was made.
OUR_PARTS = {"input_audio"}
# The part of OpenAI's admin API that issue and revoke keys and read the usage.
ORGANIZATION = {
    "GET /organization/projects",
    "POST /organization/projects",
    "GET /organization/projects/{id}",
    "POST /organization/projects/{id}",
    "POST /organization/projects/{id}/archive",
    "GET /organization/projects/{id}/api_keys",
    "POST /organization/projects/{id}/api_keys",
    "GET /organization/projects/{id}/api_keys/{key_id}",
    "DELETE /organization/projects/{id}/api_keys/{key_id}",
    "GET /organization/usage/completions",
    "GET /organization/costs",
}


def _tags(union: Any) -> set[str]:
    return {member.__struct_config__.tag for member in get_args(union)}


# The names in the types of src. test_endpoints.py compares endpoints with the OpenAPI document.
OWN: dict[str, Callable[[], set[str]]] = {
    "parameters": lambda: set(request.CreateRequest.__struct_encode_fields__),
    "input_items": lambda: set(ITEMS.members),
    "output_items": lambda: _tags(OutputItem),
    "parts": lambda: {*PARTS.members, *ANNOTATIONS.members},
    "tools": lambda: set(TOOLS.members),
    "choices": lambda: {*CHOICE_WORDS, *CHOICES.members},
    "formats": lambda: _tags(request.Format),
    "includes": lambda: set(get_args(request.Include)),
    "events": lambda: set(EVENTS.members),
    "statuses": lambda: set(get_args(response.Status)),
    "reasons": lambda: set(get_args(response.IncompleteReason)),
}


def _section(title: str) -> str:
    text = (SHARED / "protocol" / "surface.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \d+\. {re.escape(title)}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[0]


def _first_cells(title: str) -> set[str]:
    """Return the names in the first column of a section's table. A cell may have several, separated by slashes."""
    cells = re.findall(r"^\| `([^`]+)`", _section(title), re.MULTILINE)
    return {name for cell in cells for name in re.split(r" / ", cell)}


def _read_endpoints() -> set[str]:
    return {re.sub(r"\s+(\{base\})?", " ", cell) for cell in re.findall(r"^\| `([^`]+)`", _section("Endpoints"), re.M)}


def _read_hosted_endpoints() -> set[str]:
    text = (SHARED / "protocol" / "hosted.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| `((?:GET|POST|DELETE) [^`]+)`", text, re.MULTILINE)
    return {cell.replace("…", "/vector_stores/{vs}") for cell in cells}


def _read_pitfalls() -> set[str]:
    text = (SHARED / "protocol" / "hosted.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## 11. Pitfalls")
    return set(re.findall(r"^(\d+)\. ", section, re.MULTILINE))


def _read_parts() -> set[str]:
    rows = [line.split("|") for line in _section("Content parts").splitlines() if line.startswith("|")][2:]
    cells = " ".join(" ".join(row[2:4]) for row in rows)
    words = set(re.findall(r"\b(?:\w+_(?:text|image|file|video|screenshot|citation|path)|text|refusal)\b", cells))
    return words | OUR_PARTS


def _read_choices() -> set[str]:
    words = re.findall(r"'(\w+)'", _section("tool_choice forms"))
    return {*words, *(name for name in _first_cells("tool_choice forms") if "[" not in name)}


def _read_outcomes(label: str) -> set[str]:
    found = re.search(rf"^- {re.escape(label)} \(SDK\): ([^.]*)\.", _section("Statuses"), re.MULTILINE)
    assert found, label
    return set(found[1].split(", "))


def _read_rules() -> set[str]:
    """Return the rules: SEM-2.3 is the third rule of section 2. Sections without a list are numbered by hand."""
    text = (SHARED / "protocol" / "semantics.md").read_text(encoding="utf-8")
    listed = {"SEM-2.0", "SEM-4.1", "SEM-4.2", "SEM-7.1", "SEM-9.1", "SEM-9.2", "SEM-9.3", "SEM-11.1", "SEM-11.2"}
    listed |= {"SEM-14.1", "SEM-15.1"}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        number = section.partition(".")[0]
        rules = re.findall(r"^- ", section, re.MULTILINE)
        assert rules or any(name.startswith(f"SEM-{number}.") for name in listed), number
        listed |= {f"SEM-{number}.{index + 1}" for index in range(len(rules))}
    return listed


def _read_lines(section: str) -> set[str]:
    text = (SHARED / "contracts.md").read_text(encoding="utf-8")
    return set(re.findall(rf"\b{section}\.\d+\b(?= )", text))


def _read_complaints() -> set[str]:
    text = (SHARED / "pain-servers.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## ([A-L])\.(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {f"{letter}{n}" for letter, body in sections for n in re.findall(r"^(\d+)\. ", body, re.MULTILINE)}


def _read_themes() -> set[str]:
    text = (SHARED / "pain-agents.md").read_text(encoding="utf-8")
    return set(re.findall(r"^## (\d+) ", text, re.MULTILINE))


LISTED: dict[str, Callable[[], set[str]]] = {
    "endpoints": _read_endpoints,
    "hosted_endpoints": _read_hosted_endpoints,
    "organization_endpoints": lambda: ORGANIZATION,
    "parameters": lambda: _first_cells("`create` parameters") | OUR_PARAMETERS,
    "input_items": lambda: _first_cells("Input item types"),
    "output_items": lambda: _first_cells("Output item types"),
    "parts": _read_parts,
    "tools": lambda: _first_cells("Tool types"),
    "choices": _read_choices,
    "formats": lambda: set(re.findall(r"^\| (\w+) \| yes", _section("text.format"), re.MULTILINE)),
    "includes": lambda: _first_cells("include values"),
    "events": lambda: _first_cells("Streaming events"),
    "statuses": lambda: _read_outcomes("Response.status"),
    "reasons": lambda: _read_outcomes("incomplete_details.reason"),
    "rules": _read_rules,
    "stateless": lambda: _read_lines("S3"),
    "contract": lambda: _read_lines("S5"),
    "requests": lambda: _read_lines("S1"),
    "results": lambda: _read_lines("S2"),
    "provider": lambda: _read_lines("S4"),
    "complaints": _read_complaints,
    "agent_complaints": _read_themes,
    "pitfalls": _read_pitfalls,
}
