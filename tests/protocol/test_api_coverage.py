"""Compare the structs with the list of everything in the API.

The list is not part of the repository but in a directory beside it. Without it these tests are skipped, and
test_sdk_types.py still compares the structs with the types of the official SDK.
"""

import functools
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from antiphon.protocol import request, response
from antiphon.protocol.codec import EVENTS
from antiphon.protocol.content import ANNOTATIONS, PARTS
from antiphon.protocol.items import ITEMS, OutputItem
from antiphon.protocol.tools import CHOICE_WORDS, CHOICES, TOOLS
from antiphon.protocol.unions import OpenUnion

SURFACE = Path(__file__).parents[3] / "shared" / "protocol" / "surface.md"
pytestmark = pytest.mark.skipif(not SURFACE.is_file(), reason=f"{SURFACE.name} is not beside the repository")

# Extensions that are not in the list, with the reason.
EXTRA_PARAMETERS = {
    "client_metadata": "Codex sends it",
    "type": "names the message on a WebSocket",
    "generate": "on a WebSocket: false prepares a turn without running it",
    "stream_id": "on a WebSocket: the lane",
}
EXTRA_RESPONSE_FIELDS = {
    "served_by": "the backend and model that served the response",
    "input_transformations": "newer than the list",
}
EXTRA_TOOL_FIELDS = {
    "web_search.search_content_types": "of the predecessor, which shares its fields",
    "web_search_2025_08_26.search_content_types": "of the predecessor, which shares its fields",
    "web_search_preview.external_web_access": "of the successor, whose fields it shares",
    "web_search_preview.filters": "of the successor, whose fields it shares",
    "web_search_preview_2025_03_11.external_web_access": "of the successor, whose fields it shares",
    "web_search_preview_2025_03_11.filters": "of the successor, whose fields it shares",
}
# Open Responses nests these fields in `error`; the SDK's type has them at the top level.
ERROR_FIELDS = {"error.code", "error.message", "error.param"}


def parts_of(cell: str) -> list[str]:
    return [part.strip() for part in cell.split("/")]


@functools.cache
def table(section: int) -> list[list[str]]:
    """Return the rows of the table in a section of the list, without its header."""
    text = SURFACE.read_text(encoding="utf-8")
    body = re.split(r"^## ", text, flags=re.MULTILINE)[section]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code(cell: str) -> str:
    found = re.match(r"`([^`]*)`", cell)
    assert found, cell
    return found[1]


def names(cell: str) -> set[str]:
    return set(re.findall(r"[a-z]+(?:_[a-z]+)+", cell))


def encode_names(struct: type) -> set[str]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name for field in info.fields} | ({info.tag_field} if info.tag_field else set())


def listed_fields(section: int, *, column: int) -> dict[str, set[str]]:
    """Return the fields that a section's table lists for each type, joined over all its rows."""
    fields: dict[str, set[str]] = {}
    for row in table(section):
        if "only" in row[-1] and "(" in row[column]:  # only in Open Responses: the row has no fields
            continue
        for tag in parts_of(code(row[0])):
            fields.setdefault(tag, set()).update(field.strip(" ?") for field in row[column].split(","))
    return fields


def our_fields(union: OpenUnion[Any], tags: set[str]) -> dict[str, set[str]]:
    return {tag: encode_names(member) for tag, member in union.members.items() if tag in tags}


def flat(fields: dict[str, set[str]]) -> set[str]:
    return {f"{tag}.{field}" for tag, names_ in fields.items() for field in names_}


def listed_items() -> dict[str, set[str]]:
    merged: dict[str, set[str]] = {}
    for section in (3, 4, 5, 6):
        for tag, fields in listed_fields(section, column=2).items():
            merged.setdefault(tag, set()).update(fields)
    return merged


def test_every_item_type_is_supported() -> None:
    assert set(ITEMS.members) == set(listed_items())


def test_every_output_item_type_is_supported() -> None:
    ours = {member.__struct_config__.tag for member in get_args(OutputItem)}
    assert ours == set(listed_fields(4, column=2))


def test_every_item_has_fields_of_all_its_forms() -> None:
    listed = flat(listed_items())
    ours = flat(our_fields(ITEMS, set(listed_items())))
    # In the API the id is that of the call. Stored outputs have an id of their own and a call_id besides. The guides
    # name the results of a web search, which no type of the SDK has.
    assert ours == listed | {"local_shell_call_output.call_id", "web_search_call.results"}


def test_every_content_part_is_supported() -> None:
    *rows, _ = table(7)
    listed = set().union(*(names(row[1]) | names(row[2]) for row in rows)) - {"function_call_output"}
    assert set(PARTS.members) == listed | {"refusal", "text", "input_audio"}


def test_every_annotation_is_supported() -> None:
    assert set(ANNOTATIONS.members) == names(table(7)[-1][1])


def test_every_tool_is_supported_with_all_fields() -> None:
    fields = listed_fields(8, column=2)
    assert set(TOOLS.members) == set(fields)
    assert flat(our_fields(TOOLS, set(fields))) == flat(fields) | set(EXTRA_TOOL_FIELDS)


def test_every_tool_choice_form_is_supported() -> None:
    (words, *_), *forms = table(9)
    assert set(CHOICE_WORDS) == set(re.findall(r"'(\w+)'", words))
    assert set(CHOICES.members) == {tag for form in forms for tag in parts_of(code(form[0]))}


def test_every_text_format_is_supported() -> None:
    ours = {member.__struct_config__.tag for member in get_args(request.Format)}
    assert ours == {row[0] for row in table(10)}


def test_every_include_value_is_supported() -> None:
    assert set(get_args(request.Include)) == {code(row[0]) for row in table(11)}


def test_every_event_is_supported_with_all_fields() -> None:
    assert set(EVENTS.members) == {code(row[0]) for row in table(12)}
    fields = listed_fields(12, column=1)
    # Every delta may have padding, but the SDK's types have the field in one event only.
    padding = {f"{tag}.obfuscation" for tag in fields if "obfuscation" in encode_names(EVENTS.members[tag])}
    # OpenAI's OpenAPI document (2.3.0) requires the name, and the SDK's type does not have it.
    added = {"error.error", "response.function_call_arguments.done.name"}
    assert flat(our_fields(EVENTS, set(fields))) == (flat(fields) - ERROR_FIELDS) | added | padding


def test_every_parameter_is_supported() -> None:
    assert encode_names(request.CreateRequest) == {code(row[0]) for row in table(2)} | set(EXTRA_PARAMETERS)


def test_every_response_field_is_supported() -> None:
    assert encode_names(response.Response) == {code(row[0]) for row in table(14)} | set(EXTRA_RESPONSE_FIELDS)


def test_minimal_response_has_every_required_field() -> None:
    bare = response.Response(id="resp_1", created_at=0, model="m")
    assert set(msgspec.to_builtins(bare)) == {code(row[0]) for row in table(14) if row[2].startswith("required")}
