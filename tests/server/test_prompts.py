"""Prompts over HTTP."""

from typing import Any

import pytest

TEMPLATE = {"model": "scripted", "instructions": "Speak like {{who}}."}


def define(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/prompts", {"template": TEMPLATE} | body)
    assert answer.status == 200
    prompt: dict[str, Any] = answer.json
    return prompt


def test_prompt_is_retrieved_by_version_or_the_newest(server: Any) -> None:
    first = define(server)
    assert first == {
        "id": first["id"],
        "version": "1",
        "created_at": first["created_at"],
        "template": TEMPLATE,
        "object": "prompt",
    }
    second = define(server, id=first["id"], template={})
    path = f"/v1/prompts/{first['id']}"
    assert server.ask("GET", path).json == second
    assert server.ask("GET", f"{path}?version=1").json == first
    listed = server.ask("GET", "/v1/prompts").json
    assert (listed["object"], [each for each in listed["data"] if each["id"] == first["id"]]) == (
        "list",
        [{name: each[name] for name in ("id", "version", "created_at", "object")} for each in (first, second)],
    )


def test_deleted_prompt_is_not_found(server: Any) -> None:
    made = define(server)
    path = f"/v1/prompts/{made['id']}"
    answer = server.ask("DELETE", path)
    assert (answer.status, answer.json) == (200, {"id": made["id"], "object": "prompt.deleted", "deleted": True})
    for method in ("GET", "DELETE"):
        answer = server.ask(method, path)
        assert (answer.status, answer.json["error"]) == (
            404,
            {
                "message": f"Prompt with id '{made['id']}' not found.",
                "type": "invalid_request_error",
                "param": "prompt_id",
                "code": "not_found",
            },
        )


def test_single_version_cannot_be_deleted(server: Any) -> None:
    made = define(server)
    path = f"/v1/prompts/{made['id']}"
    answer = server.ask("DELETE", f"{path}?version=1")
    assert (answer.status, answer.json["error"]) == (
        400,
        {
            "message": "A single version cannot be deleted: send no 'version' to delete all of them.",
            "type": "invalid_request_error",
            "param": "version",
            "code": "unsupported_parameter",
        },
    )
    assert server.ask("GET", path).json == made
    answer = server.ask("DELETE", f"{path}?force=true")
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: force")


def test_unknown_version_is_not_found(server: Any) -> None:
    answer = server.ask("GET", f"/v1/prompts/{define(server)['id']}?version=2")
    assert (answer.status, answer.json["error"]["param"]) == (404, "prompt_id")


def test_sdk_creates_a_response_from_a_prompt(server: Any) -> None:
    made = define(server)
    reference = {"id": made["id"], "variables": {"who": "Ada"}}
    response = server.client().responses.create(prompt=reference, input="Hello")
    assert (response.instructions, response.output_text) == ("Speak like Ada.", "You said: Hello")
    assert response.prompt.model_dump(exclude_none=True) == reference


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "template", "missing_required_parameter"),
        ({"template": "x"}, "template", "invalid_type"),
        ({"template": {}, "id": "a/b"}, "id", "invalid_value"),
        ({"template": {}, "id": ""}, "id", "invalid_value"),
        ({"template": {}, "version": ".."}, "version", "invalid_value"),
        ({"template": {"top_p": 7}}, "template.top_p", "invalid_value"),
        ({"template": {"stream": True}}, "template.stream", "invalid_value"),
    ],
)
def test_invalid_definition_names_the_parameter(server: Any, body: dict[str, Any], param: str, code: str) -> None:
    answer = server.ask("POST", "/v1/prompts", body)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize("depth", [90, 300, 900, 100_000])
def test_deeply_nested_template_or_variable_is_no_server_error(server: Any, depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    assert server.ask("POST", "/v1/prompts", b'{"template":{"client_metadata":' + deep + b"}}").status in (200, 400)
    made = define(server)["id"].encode()
    body = b'{"prompt":{"id":"' + made + b'","variables":{"who":' + deep + b'}},"input":"hi"}'
    assert server.ask("POST", "/v1/responses", body).status == 400


def test_unknown_fields_are_listed_in_a_header(server: Any) -> None:
    answer = server.ask("POST", "/v1/prompts", {"template": {}, "name": "greeting"})
    assert (answer.status, answer.headers["x-antiphon-warnings"]) == (200, "ignored: name")


def test_prompt_is_hidden_from_another_project(guarded: Any) -> None:
    ada, bob = ({"Authorization": f"Bearer {key}"} for key in ("sk-ada", "sk-bob"))
    made = guarded.ask("POST", "/v1/prompts", {"template": TEMPLATE}, headers=ada).json
    path = f"/v1/prompts/{made['id']}"
    for method in ("GET", "DELETE"):
        assert guarded.ask(method, path, headers=bob).status == 404
    assert guarded.ask("GET", "/v1/prompts", headers=bob).json["data"] == []
    assert guarded.ask("GET", path, headers=ada).json == made


def test_stateless_server_has_no_prompts(serve: Any) -> None:
    assert serve(stateless=True).ask("GET", "/v1/prompts").status == 404
