"""Conversations over HTTP, including details that the SDK does not show."""

from typing import Any

import pytest


def say(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def begin(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/conversations", body)
    assert answer.status == 200
    conversation: dict[str, Any] = answer.json
    return conversation


def texts_of(page: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


def test_conversation_is_created_with_items_and_metadata(server: Any) -> None:
    made = begin(server, items=say("one", "two"), metadata={"topic": "demo"})
    assert made == {
        "id": made["id"],
        "object": "conversation",
        "created_at": made["created_at"],
        "metadata": {"topic": "demo"},
    }
    path = f"/v1/conversations/{made['id']}"
    assert server.ask("GET", path).json == made
    assert texts_of(server.ask("GET", f"{path}/items?order=asc").json) == ["one", "two"]


def test_conversation_without_a_body_is_empty(server: Any) -> None:
    made = server.ask("POST", "/v1/conversations")
    assert (made.status, made.json["metadata"]) == (200, {})
    page = server.ask("GET", f"/v1/conversations/{made.json['id']}/items").json
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_update_replaces_the_metadata(server: Any) -> None:
    made = begin(server, metadata={"a": "1", "b": "2"})
    path = f"/v1/conversations/{made['id']}"
    updated = server.ask("POST", path, {"metadata": {"c": "3"}})
    assert updated.json == made | {"metadata": {"c": "3"}}
    assert server.ask("GET", path).json == updated.json


def test_deleted_conversation_is_not_found(server: Any) -> None:
    path = f"/v1/conversations/{(made := begin(server, items=say('one')))['id']}"
    answer = server.ask("DELETE", path)
    assert (answer.status, answer.json) == (
        200,
        {"id": made["id"], "object": "conversation.deleted", "deleted": True},
    )
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
        assert server.ask(method, f"{path}{rest}").json["error"] == {
            "message": f"Conversation with id '{made['id']}' not found.",
            "type": "invalid_request_error",
            "param": "conversation_id",
            "code": "not_found",
        }


def test_added_items_are_returned_in_order(server: Any) -> None:
    path = f"/v1/conversations/{begin(server, items=say('one'))['id']}/items"
    page = server.ask("POST", f"{path}?include[]=message.input_image.image_url", {"items": say("two", "three")}).json
    ids = [item["id"] for item in page["data"]]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", *ids, False)
    assert texts_of(page) == ["two", "three"]
    assert texts_of(server.ask("GET", path).json) == ["three", "two", "one"]
    following = server.ask("GET", f"{path}?order=asc&limit=1&after={ids[0]}").json
    assert following == {
        "object": "list",
        "data": page["data"][1:],
        "first_id": ids[1],
        "last_id": ids[1],
        "has_more": False,
    }


def test_empty_list_of_items_adds_nothing(server: Any) -> None:
    """OpenAI's reference has a maximum of items but no minimum, and sessions of agents add empty lists."""
    conversations = server.client().conversations
    made = conversations.create(items=[])
    page = conversations.items.create(made.id, items=[])
    assert (page.data, page.has_more, list(conversations.items.list(made.id))) == ([], False, [])


def test_part_of_another_api_is_refused(server: Any) -> None:
    items = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    path = f"/v1/conversations/{begin(server)['id']}/items"
    for where, body, name in (
        ("/v1/conversations", {"items": items}, "items"),
        (path, {"items": items}, "items"),
        ("/v1/responses", {"model": "scripted", "input": items}, "input"),
        ("/v1/responses/input_tokens", {"model": "scripted", "input": items}, "input"),
        ("/v1/responses/compact", {"model": "scripted", "input": items}, "input"),
    ):
        answer = server.ask("POST", where, body)
        assert (answer.status, answer.json["error"]) == (
            400,
            {
                "message": f"Invalid value for '{name}[0].content[0].type': 'image_url' is not allowed here: use a "
                "part of type 'input_image'.",
                "type": "invalid_request_error",
                "param": f"{name}[0].content[0].type",
                "code": "invalid_value",
            },
        )


def test_item_is_retrieved_and_deleted_by_id(server: Any) -> None:
    made = begin(server)
    path = f"/v1/conversations/{made['id']}/items"
    (item,) = server.ask("POST", path, {"items": say("one")}).json["data"]
    assert server.ask("GET", f"{path}/{item['id']}").json == item
    assert server.ask("DELETE", f"{path}/{item['id']}").json == made
    for method in ("GET", "DELETE"):
        answer = server.ask(method, f"{path}/{item['id']}")
        assert (answer.status, answer.json["error"]["param"]) == (404, "item_id")


def test_item_id_may_contain_any_characters(server: Any) -> None:
    conversations = server.client().conversations
    made = conversations.create()
    for item_id in ("a/b", "%2F", "50%", "ä?b#c", "../x"):
        conversations.items.create(made.id, items=[{"type": "message", "role": "user", "content": "x", "id": item_id}])
        found = conversations.items.retrieve(item_id, conversation_id=made.id)
        assert (found.id, conversations.items.delete(item_id, conversation_id=made.id).id) == (item_id, made.id)
    assert list(conversations.items.list(made.id)) == []


@pytest.mark.parametrize("item_id", [5, {}, [1], True])
def test_item_id_that_is_not_unicode_is_refused(server: Any, item_id: Any) -> None:
    path = f"/v1/conversations/{begin(server)['id']}/items"
    items = [*say("one"), {"type": "acme:note", "id": item_id}]
    for where, body, param in (
        ("/v1/conversations", {"items": items}, "items[1].id"),
        (path, {"items": items}, "items[1].id"),
        ("/v1/responses", {"model": "scripted", "input": items}, "input[1].id"),
        ("/v1/responses/input_tokens", {"model": "scripted", "input": items}, "input[1].id"),
        ("/v1/responses/compact", {"model": "scripted", "input": items}, "input[1].id"),
    ):
        answer = server.ask("POST", where, body)
        assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (
            400,
            param,
            "invalid_type",
        )
    assert server.ask("GET", path).json["data"] == []


def test_reference_to_an_empty_id_names_its_param_path(server: Any) -> None:
    for path, name in (("/v1/conversations", "items"), ("/v1/responses", "input")):
        body = {name: [*say("one"), *refer_to({"id": ""})]}
        answer = server.ask("POST", path, body | ({"model": "scripted"} if name == "input" else {}))
        assert (answer.status, answer.json["error"]["param"]) == (400, f"{name}[1].id")


def test_response_reads_and_extends_its_conversation(server: Any) -> None:
    made = begin(server, items=say("my name is ada"))
    body = {"model": "scripted", "input": "recall", "conversation": made["id"]}
    answer = server.ask("POST", "/v1/responses", body)
    assert answer.json["conversation"] == {"id": made["id"]}
    page = server.ask("GET", f"/v1/conversations/{made['id']}/items?order=asc").json
    assert texts_of(page) == ["my name is ada", "recall", "Your name is ada."]
    assert page["data"][-1] == answer.json["output"][0]


def refer_to(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def test_references_resolve_to_the_stored_items(server: Any) -> None:
    response = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hello"}).json
    input_items = server.ask("GET", f"/v1/responses/{response['id']}/input_items").json["data"]
    other = server.ask("GET", f"/v1/conversations/{begin(server, items=say('one'))['id']}/items").json["data"]
    stored = [*input_items, *response["output"], *other]
    path = f"/v1/conversations/{begin(server, items=refer_to(*stored[:1]))['id']}/items"
    assert server.ask("POST", path, {"items": [*say("new"), *refer_to(*stored[1:])]}).json["data"][1:] == stored[1:]
    assert texts_of(server.ask("GET", f"{path}?order=asc").json) == ["hello", "new", "You said: hello", "one"]


def test_unknown_reference_names_its_param_path(server: Any, guarded: Any) -> None:
    ada, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-ada", "sk-bob"))
    theirs = guarded.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers=bob).json["output"][0]
    body = {"items": [*say("one"), *refer_to(theirs)]}
    made = guarded.ask("POST", "/v1/conversations", {}, headers=ada).json
    for path in ("/v1/conversations", f"/v1/conversations/{made['id']}/items"):
        answer = guarded.ask("POST", path, body, headers=ada)
        assert (answer.status, answer.json["error"]) == (
            404,
            {
                "message": f"Item with id '{theirs['id']}' not found. "
                "Items are saved only if their response is stored.",
                "type": "invalid_request_error",
                "param": "items[1]",
                "code": "not_found",
            },
        )
    assert guarded.ask("GET", f"/v1/conversations/{made['id']}/items", headers=ada).json["data"] == []


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"items": say(*["x"] * 21)}, "items", "invalid_value"),
        ({"items": "x"}, "items", "invalid_type"),
        ({"items": [{"role": "nobody", "content": "x"}]}, "items[0].role", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata", "invalid_type"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "invalid_value"),
    ],
)
def test_invalid_conversation_names_the_parameter(server: Any, body: dict[str, Any], param: str, code: str) -> None:
    answer = server.ask("POST", "/v1/conversations", body)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, code)


def test_update_requires_metadata(server: Any) -> None:
    answer = server.ask("POST", f"/v1/conversations/{begin(server)['id']}", {})
    assert (answer.status, answer.json["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize("body", [{}, {"items": None}, {"items": say(*["x"] * 21)}])
def test_invalid_items_name_the_parameter(server: Any, body: dict[str, Any]) -> None:
    answer = server.ask("POST", f"/v1/conversations/{begin(server)['id']}/items", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "items")


def test_duplicate_item_is_refused(server: Any) -> None:
    path = f"/v1/conversations/{begin(server)['id']}/items"
    (item,) = server.ask("POST", path, {"items": say("one")}).json["data"]
    answer = server.ask("POST", path, {"items": [*say("two"), item]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "items")
    assert texts_of(server.ask("GET", path).json) == ["one"]


@pytest.mark.parametrize(("query", "param"), [("limit=0", "limit"), ("order=up", "order"), ("after=msg_0", "after")])
def test_invalid_page_names_the_parameter(server: Any, query: str, param: str) -> None:
    answer = server.ask("GET", f"/v1/conversations/{begin(server)['id']}/items?{query}")
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_unknown_fields_are_listed_in_a_header(server: Any) -> None:
    answer = server.ask("POST", "/v1/conversations", {"items": [{"role": "user", "content": "x", "foo": 1}], "bar": 2})
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: bar, items[0].foo")


def test_conversation_is_hidden_from_another_project(guarded: Any) -> None:
    ada, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-ada", "sk-bob"))
    made = guarded.ask("POST", "/v1/conversations", {}, headers=ada).json
    path = f"/v1/conversations/{made['id']}"
    for method, rest in (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
        body = {"metadata": {}} if method == "POST" else None
        assert guarded.ask(method, f"{path}{rest}", body, headers=bob).status == 404
    assert guarded.ask("GET", path, headers=ada).json == made
