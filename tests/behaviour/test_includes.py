"""Values of `include`."""

from typing import Any

import openai
import pytest

from antiphon.testing.scripted import serve_script
from behaviour.item_samples import in_company
from behaviour.samples import PARTS, TOOLS
from behaviour.wire import HIDDEN_FIELDS, ask, get, read_stream
from manifest import names


@pytest.mark.parametrize("name", names("includes"))
def test_include_value_is_accepted(server: Any, name: str) -> None:
    response = ask(server, "hi", include=[name])
    for path in (f"/responses/{response['id']}", f"/responses/{response['id']}/input_items"):
        get(server, f"{path}?include={name}")


def make_items(name: str) -> list[dict[str, Any]]:
    kind, *_ = name.split(".")
    if kind == "message":
        return [{"type": "message", "role": "user", "content": [PARTS["input_image"]]}]
    return in_company(kind)


def dig(item: dict[str, Any], path: list[str]) -> Any:
    """Return the value at a path. In a message, `input_image` is its first part."""
    for key in path:
        item = item["content"][0] if key == "input_image" else item[key]
    return item


@pytest.mark.parametrize("name", [name for name in names("includes", "implemented") if "logprobs" not in name])
def test_included_field_is_returned(server: Any, name: str) -> None:
    sent = make_items(name)
    response = ask(server, sent, include=[name])
    page = get(server, f"/responses/{response['id']}/input_items?order=asc&include={name}")
    path = name.split(".")[1:]
    assert dig(page["data"][-1], path) == dig(sent[-1], path)
    assert dig(sent[-1], path)


@pytest.mark.parametrize("name", HIDDEN_FIELDS)
def test_field_is_hidden_without_include(server: Any, name: str) -> None:
    response = ask(server, make_items(name))
    page = get(server, f"/responses/{response['id']}/input_items?order=asc")
    *path, last = name.split(".")[1:]
    assert dig(page["data"][-1], path).get(last) is None


@pytest.mark.parametrize("name", HIDDEN_FIELDS)
def test_field_is_hidden_in_all_events_of_a_stream(name: str) -> None:
    kind, *path, last = name.split(".")
    sent = make_items(name)[-1]
    tool: Any = TOOLS[kind.removesuffix("_call")]
    with serve_script({"default": [{"item": sent}]}) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0)
        for include, found in (([name], dig(sent, path)[last]), ([], None)):
            stream: Any = client.responses.create(
                model="scripted", input="hi", stream=True, tools=[tool], include=include
            )
            events = [event.to_dict() for event in stream]
            items = [event["item"] for event in events if "item" in event] + events[-1]["response"]["output"]
            assert [dig(item, path).get(last) for item in items] == [found] * 3


SEALED = "include=reasoning.encrypted_content"


def find_reasoning(items: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (item for item in items if item["type"] == "reasoning")
    return found


def test_encrypted_reasoning_can_be_included_later(server: Any) -> None:
    conversation = server.ask("POST", "/v1/conversations", {}).json["id"]
    response = ask(server, "think", conversation=conversation)
    bare = find_reasoning(response["output"])
    assert bare.get("encrypted_content") is None
    sealed = find_reasoning(get(server, f"/responses/{response['id']}?{SEALED}")["output"])
    assert sealed == bare | {"encrypted_content": sealed["encrypted_content"]}
    assert sealed["encrypted_content"]
    items = f"/conversations/{conversation}/items"
    assert find_reasoning(get(server, f"{items}?{SEALED}")["data"]) == sealed
    assert get(server, f"{items}/{bare['id']}?{SEALED}") == sealed
    body = {"model": "scripted", "input": [bare, *response["output"][1:], {"role": "user", "content": "hi"}]}
    again = server.ask("POST", "/v1/responses", body).json
    assert find_reasoning(get(server, f"/responses/{again['id']}/input_items?{SEALED}")["data"]) == sealed
    other = server.ask("POST", "/v1/conversations", {}).json["id"]
    added = server.ask("POST", f"/v1/conversations/{other}/items?{SEALED}", {"items": [bare]})
    assert find_reasoning(added.json["data"]) == sealed
    for path in (f"/responses/{response['id']}", f"{items}/{bare['id']}"):
        found = get(server, path)
        assert (find_reasoning(found["output"]) if "output" in found else found) == bare


def test_encrypted_reasoning_can_be_included_in_a_replayed_stream(server: Any) -> None:
    response = ask(server, "think", background=True)
    path = f"/v1/responses/{response['id']}?stream=true"
    plain, sealed = (read_stream(server.ask("GET", each).body) for each in (path, f"{path}&{SEALED}"))
    stored = get(server, f"/responses/{response['id']}?{SEALED}")
    seal = find_reasoning(stored["output"])["encrypted_content"]
    assert sealed[-1]["response"] == stored
    for event in plain:
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning":
            event["item"]["encrypted_content"] = seal
    plain[-1]["response"] = stored
    assert sealed == plain


def test_encrypted_reasoning_that_was_included_later_is_accepted(server: Any) -> None:
    response = ask(server, "think")
    sealed = get(server, f"/responses/{response['id']}?{SEALED}")["output"]
    reasoning = {name: sealed[0][name] for name in ("type", "id", "summary", "encrypted_content")}
    rest = [sealed[1], {"role": "user", "content": "hi"}]
    right, wrong = (
        server.ask("POST", "/v1/responses", {"model": "scripted", "store": False, "input": [each, *rest]})
        for each in (reasoning, reasoning | {"encrypted_content": "ant1.AAAA"})
    )
    assert (right.status, right.headers.get("x-antiphon-warnings")) == (200, None)
    assert (wrong.status, "cannot be opened" in wrong.headers["x-antiphon-warnings"]) == (200, True)
