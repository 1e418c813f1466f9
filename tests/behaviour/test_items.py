"""Items of every type are accepted and returned unchanged."""

from typing import Any

import pytest

from behaviour.item_samples import ITEMS, in_company
from behaviour.wire import INCLUDE_ALL, ask, get, list_input, of_type, stream
from manifest import names

USER = {
    "type": "message",
    "id": "msg_u",
    "role": "user",
    "status": "completed",
    "content": [{"type": "input_text", "text": "hi"}],
}
SENT = [name for name in names("input_items", "implemented", "accepted") if name in ITEMS]


@pytest.mark.parametrize("name", SENT)
def test_input_is_returned_unchanged(server: Any, name: str) -> None:
    sent = [USER, *in_company(name)]
    assert list_input(server, ask(server, sent)) == sent


# An output's status says if a patch was applied, so it is required.
STATUS_OPTIONAL = [name for name in SENT if "status" in ITEMS[name] and name != "apply_patch_call_output"]


@pytest.mark.parametrize("name", STATUS_OPTIONAL)
def test_input_without_a_status_is_completed(server: Any, name: str) -> None:
    """OpenAI accepts it, and LangChain sends image_generation_call so."""
    sent = [USER, *in_company(name)]
    without = [{key: item[key] for key in item if key != "status" or item["id"] != ITEMS[name]["id"]} for item in sent]
    assert without != sent
    completed = [item | {"status": "completed"} if item["id"] == ITEMS[name]["id"] else item for item in sent]
    assert list_input(server, ask(server, without)) == completed


@pytest.mark.parametrize("name", SENT)
def test_conversation_returns_the_item_unchanged(server: Any, name: str) -> None:
    sent = in_company(name)
    conversation = server.ask("POST", "/v1/conversations", {"items": sent}).json["id"]
    assert get(server, f"/conversations/{conversation}/items?order=asc&{INCLUDE_ALL}")["data"] == sent
    item_id = ITEMS[name]["id"]
    assert get(server, f"/conversations/{conversation}/items/{item_id}?{INCLUDE_ALL}") == ITEMS[name]
    ask(server, "hi", conversation=conversation)
    assert get(server, f"/conversations/{conversation}/items?order=asc&{INCLUDE_ALL}")["data"][: len(sent)] == sent


def test_unknown_item_is_returned_unchanged(server: Any) -> None:
    sent = [USER, {"type": "acme:note", "id": "acme_1", "status": "completed", "n": [1, None]}]
    assert list_input(server, ask(server, sent)) == sent


def test_reference_is_replaced_by_its_item(server: Any) -> None:
    first = ask(server, "my name is ada")
    (input_item,) = list_input(server, first)
    second = ask(server, [{"type": "item_reference", "id": input_item["id"]}, {"id": first["output"][0]["id"]}, USER])
    assert list_input(server, second) == [input_item, first["output"][0], USER]


def test_reference_to_an_unstored_item_is_not_found(server: Any) -> None:
    unstored = ask(server, "hi", store=False)["output"][0]["id"]
    body = {"model": "scripted", "input": [{"type": "item_reference", "id": unstored}]}
    answer = server.ask("POST", "/v1/responses", body)
    assert (answer.status, answer.json["error"]["message"], answer.json["error"]["param"]) == (
        404,
        f"Item with id '{unstored}' not found. Items are saved only if their response is stored.",
        "input[0]",
    )


def test_encrypted_reasoning_is_accepted_without_a_stored_item(server: Any) -> None:
    sealed = {"type": "reasoning", "id": "rs_of_elsewhere", "summary": [], "encrypted_content": "sealed"}
    assert ask(server, [USER, sealed, ITEMS["message"]], store=False)["status"] == "completed"


@pytest.mark.parametrize("name", ["message", "function_call", "reasoning", "custom_tool_call"])
def test_model_output_item_is_streamed(server: Any, name: str) -> None:
    events = stream(server, "everything")
    items = [event["item"] for event in of_type(events, "response.output_item.done")]
    assert name in [item["type"] for item in items]
    assert events[-1]["response"]["output"] == items


@pytest.mark.parametrize("name", names("output_items"))
def test_whole_item_of_the_model_is_sent_and_stored(server: Any, name: str) -> None:
    item = ITEMS[name]
    events = stream(server, f"item {name}!")
    assert of_type(events, "response.output_item.added")[0]["item"] == item
    response = events[-1]["response"]
    assert response["output"][0] == item
    assert get(server, f"/responses/{response['id']}?{INCLUDE_ALL}") == response
    (input_item,) = list_input(server, response)
    # Output items are accepted as input.
    sent = [input_item, *in_company(name)]
    assert list_input(server, ask(server, sent)) == sent
