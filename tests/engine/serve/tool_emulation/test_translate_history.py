"""Translation of history items for a model that only supports functions."""

import json
from typing import Any

import pytest

from antiphon.engine.serve.tool_emulation.catalog import Catalog
from antiphon.engine.serve.tool_emulation.translate_history import is_readable, translate_items
from antiphon.protocol import codec
from antiphon.protocol.content import extract_text
from antiphon.protocol.items import ITEMS as FAMILY
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Message
from behaviour.item_samples import ITEMS

ONLY_FUNCTIONS = frozenset({"function"})


def read(*sent: dict[str, Any]) -> list[Any]:
    items = FAMILY.decode_list(codec.encode(list(sent)))
    return translate_items(items, Catalog([], items, ONLY_FUNCTIONS), custom=False, images=True)


def leaves(value: Any) -> list[str]:
    """All that a sample says, but for what it is and how it is numbered."""
    if isinstance(value, dict):
        return [leaf for name, each in value.items() if name not in ("type", "id", "status") for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [json.dumps(value).strip('"')] if value is not None else []


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_type_becomes_readable(name: str) -> None:
    assert all(map(is_readable, read(ITEMS[name])))


HOSTED = ["mcp_call", "file_search_call", "web_search_call", "code_interpreter_call"]
HOSTED += ["image_generation_call", "mcp_approval_request", "mcp_approval_response", "program_output"]


@pytest.mark.parametrize("name", HOSTED)
def test_no_content_of_hosted_items_is_lost(name: str) -> None:
    texts = codec.encode(read(ITEMS[name])).decode().replace('\\"', '"')
    # The id of an approval was never part of a call that a model wrote.
    assert [leaf for leaf in leaves(ITEMS[name]) if leaf not in texts and not leaf.startswith("mcpr_")] == []


def test_list_of_mcp_tools_is_not_shown_to_the_model() -> None:
    assert read(ITEMS["mcp_list_tools"]) == []


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mcp_call", "t"),
        ("file_search_call", "file_search"),
        ("web_search_call", "web_search"),
        ("code_interpreter_call", "code_interpreter"),
        ("image_generation_call", "image_generation"),
    ],
)
def test_hosted_call_becomes_a_call_with_an_output(name: str, function: str) -> None:
    called, came = read(ITEMS[name])
    assert isinstance(called, FunctionCall)
    assert isinstance(came, FunctionCallOutput)
    assert (called.call_id, called.name) == (came.call_id, function)


def test_hosted_call_is_split_into_arguments_and_result() -> None:
    called, came = read(ITEMS["code_interpreter_call"])
    assert (json.loads(called.arguments), json.loads(came.output)) == (
        {"code": "1+1"},
        {"container_id": "cntr_1", "status": "completed", "outputs": [{"type": "logs", "logs": "2"}]},
    )


def test_program_and_its_output_share_a_call_id() -> None:
    called, came = read(ITEMS["program"], ITEMS["program_output"])
    assert (called.call_id, came.call_id, came.output) == ("call_program", "call_program", "1")


def test_denied_call_becomes_a_call_with_the_reason() -> None:
    request = ITEMS["mcp_approval_request"]
    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"]}
    denied = read(request, answer | {"approve": False, "reason": "too risky"})
    text = "The user did not approve this call. It was not executed."
    call = FunctionCall(request["id"], request["name"], request["arguments"], status="completed")
    assert denied == [call, FunctionCallOutput(f"{text} Reason: too risky", request["id"], status="completed")]
    assert read(request) == [call, FunctionCallOutput(text, request["id"], status="completed")]
    assert read(request, answer | {"approve": True}) == []  # the call has an item of its own


def test_approval_without_its_request_becomes_a_message() -> None:
    (given,) = read(ITEMS["mcp_approval_response"])
    assert (given.role, json.loads(extract_text(given.content))["type"]) == ("user", "mcp_approval_response")


def test_unknown_item_becomes_a_message_with_its_json() -> None:
    unknown = {"type": "acme:note", "n": [1, None]}
    (texts,) = read(unknown)
    assert isinstance(texts, Message)
    assert json.loads(extract_text(texts.content)) == unknown


def test_server_searches_get_different_call_ids() -> None:
    search = {"type": "tool_search_call", "execution": "server", "arguments": {"query": "x"}}
    found = {"type": "tool_search_output", "execution": "server", "tools": []}
    assert [item.call_id for item in read(search, found, search, search, found, found)] == [
        "call_search_1",
        "call_search_1",
        "call_search_2",
        "call_search_3",
        "call_search_2",
        "call_search_3",
    ]
