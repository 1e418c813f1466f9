"""Items of every type: in as they are, and back as they were."""

from typing import Any

import pytest

from behaviour.item_samples import ITEMS, in_company
from behaviour.wire import ask, get, list_input, of_type, stream
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
def test_it_goes_in_and_comes_back_as_it_was(server: Any, name: str) -> None:
    sent = [USER, *in_company(name)]
    assert list_input(server, ask(server, sent)) == sent


@pytest.mark.parametrize("name", SENT)
def test_a_conversation_keeps_it_as_it_was(server: Any, name: str) -> None:
    sent = in_company(name)
    conversation = server.ask("POST", "/v1/conversations", {"items": sent}).json["id"]
    assert get(server, f"/conversations/{conversation}/items?order=asc")["data"] == sent
    item_id = ITEMS[name]["id"]
    assert get(server, f"/conversations/{conversation}/items/{item_id}") == ITEMS[name]
    ask(server, "hi", conversation=conversation)
    assert get(server, f"/conversations/{conversation}/items?order=asc")["data"][: len(sent)] == sent


def test_an_item_of_an_unknown_type_comes_back_as_it_was(server: Any) -> None:
    sent = [USER, {"type": "acme:note", "id": "acme_1", "status": "completed", "n": [1, None]}]
    assert list_input(server, ask(server, sent)) == sent


def test_a_reference_becomes_the_item_it_points_to(server: Any) -> None:
    first = ask(server, "my name is ada")
    (asked,) = list_input(server, first)
    second = ask(server, [{"type": "item_reference", "id": asked["id"]}, {"id": first["output"][0]["id"]}, USER])
    assert list_input(server, second) == [asked, first["output"][0], USER]


def test_a_reference_to_what_was_not_stored_is_not_found(server: Any) -> None:
    unstored = ask(server, "hi", store=False)["output"][0]["id"]
    body = {"model": "scripted", "input": [{"type": "item_reference", "id": unstored}]}
    answer = server.ask("POST", "/v1/responses", body)
    assert (answer.status, answer.json["error"]["message"], answer.json["error"]["param"]) == (
        404,
        f"Item with id '{unstored}' not found. Items are saved only if their response is stored.",
        "input[0]",
    )


def test_sealed_reasoning_goes_in_without_being_looked_up(server: Any) -> None:
    sealed = {"type": "reasoning", "id": "rs_of_elsewhere", "summary": [], "encrypted_content": "sealed"}
    assert ask(server, [USER, sealed, ITEMS["message"]], store=False)["status"] == "completed"


@pytest.mark.parametrize("name", ["message", "function_call", "reasoning", "custom_tool_call"])
def test_the_model_says_it(server: Any, name: str) -> None:
    events = stream(server, "everything")
    told = [event["item"] for event in of_type(events, "response.output_item.done")]
    assert name in [item["type"] for item in told]
    assert events[-1]["response"]["output"] == told


@pytest.mark.parametrize("name", names("output_items"))
def test_a_whole_item_of_the_model_is_shown_and_kept(server: Any, name: str) -> None:
    item = ITEMS[name]
    events = stream(server, f"item {name}!")
    assert of_type(events, "response.output_item.added")[0]["item"] == item
    response = events[-1]["response"]
    assert response["output"][0] == item
    assert get(server, f"/responses/{response['id']}") == response
    (asked,) = list_input(server, response)
    # What comes out can be sent back in.
    sent = [asked, *in_company(name)]
    assert list_input(server, ask(server, sent)) == sent
