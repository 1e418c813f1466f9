"""`POST /v1/responses/compact`, and the use of its item as input."""

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.config.settings import ApiKey
from support import openresponses
from support.live_server import LiveServer

NOTES = "Goal: a red bridge."
SCRIPT = {
    "rules": [
        {"text": "You write the notes", "answers": [NOTES]},
        {"user": "recall", "text": NOTES, "answers": ["It was to be red."]},
        {"user": "recall", "answers": ["I do not know."]},
        {"user": "count", "answers": ["{history}"]},
    ]
}
RULE = {"role": "developer", "content": "Be kind."}
TASK = {"role": "user", "content": "Build a bridge."}
# Larger than the assumed context window, so that a part is summarised.
LONG: list[Any] = [RULE, TASK, *({"role": "assistant", "content": f"Beam {n}. {'word ' * 4000}"} for n in range(40))]


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


def compact(running: LiveServer, body: dict[str, Any], *, key: str = "any") -> Any:
    return running.ask("POST", "/v1/responses/compact", body, headers={"Authorization": f"Bearer {key}"})


def ask(running: LiveServer, items: list[Any], *, key: str = "any") -> Any:
    body = {"model": "scripted", "input": items}
    return running.ask("POST", "/v1/responses", body, headers={"Authorization": f"Bearer {key}"})


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def get_text(answer: Any) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json["output"][-1]["content"][0]["text"]
    return text


def test_items_that_share_an_id_are_all_compacted(running: LiveServer) -> None:
    shared = [
        {"id": "m", **say("one")},
        {"id": "m", "role": "assistant", "content": "two"},
        {"id": "m", **say("three")},
    ]
    for body in ({"input": shared}, {"input": [*shared, {"type": "compaction_trigger"}], "store": False}):
        path = "/v1/responses/compact" if "store" not in body else "/v1/responses"
        made = running.ask("POST", path, {"model": "scripted", **body})
        assert (made.status, made.headers.get("x-antiphon-warnings")) == (200, None)
        assert get_text(ask(running, [*made.json["output"], say("count")])) == "4"


def test_compact_returns_the_window_to_continue_with(running: LiveServer) -> None:
    answer = compact(running, {"model": "scripted", "input": LONG})
    compacted = answer.json
    openresponses.validate_compaction(compacted)
    assert (answer.status, compacted["object"]) == (200, "response.compaction")
    assert [(item["type"], item.get("role")) for item in compacted["output"]] == [
        ("message", "developer"),
        ("message", "user"),
        ("compaction", None),
    ]
    assert compacted["output"][1]["content"] == [{"type": "input_text", "text": "Build a bridge."}]
    assert compacted["output"][2]["id"].startswith("cmp_")
    assert compacted["usage"]["output_tokens"] == len(NOTES.split())


def test_compact_output_works_as_input_without_duplicates(running: LiveServer) -> None:
    output = compact(running, {"model": "scripted", "input": LONG}).json["output"]
    assert get_text(ask(running, [*output, say("recall")])) == "It was to be red."
    whole = int(get_text(ask(running, [*output, say("count")])))
    alone = int(get_text(ask(running, [output[-1], say("count")])))
    assert whole == alone + 1  # the rule is retained for clients only


def test_compact_returns_all_user_messages_of_a_short_conversation(running: LiveServer) -> None:
    sent = [say("one"), {"role": "assistant", "content": "two"}, say("three"), {"role": "assistant", "content": "four"}]
    *messages, compaction = compact(running, {"model": "scripted", "input": sent}).json["output"]
    assert [message["content"][0]["text"] for message in messages] == ["one", "three"]
    assert get_text(ask(running, [*messages, compaction, say("count")])) == "5"


def test_compaction_is_not_stored_as_a_response(running: LiveServer) -> None:
    compacted = compact(running, {"model": "scripted", "input": LONG}).json
    assert not compacted["id"].startswith("resp_")
    assert running.ask("GET", f"/v1/responses/{compacted['id']}").status == 404
    answer = ask(running, [say("hi")])
    body = {"model": "scripted", "input": "hi", "previous_response_id": compacted["id"]}
    assert (answer.status, running.ask("POST", "/v1/responses", body).status) == (200, 400)


def test_compact_of_a_previous_response(running: LiveServer) -> None:
    first = ask(running, LONG[:3]).json
    body = {"model": "scripted", "previous_response_id": first["id"]}
    output = compact(running, body).json["output"]
    assert get_text(ask(running, [*output, say("count")])) == "5"


def test_earlier_compaction_is_compacted_again(running: LiveServer) -> None:
    output = compact(running, {"model": "scripted", "input": LONG}).json["output"]
    again = compact(running, {"model": "scripted", "input": [*output, *LONG[2:]]}).json["output"]
    assert [item["type"] for item in again] == ["message", "message", "compaction"]
    assert get_text(ask(running, [*again, say("recall")])) == "It was to be red."


@pytest.mark.parametrize("items", [{}, {"input": None}, {"input": []}, {"instructions": "Be kind."}])
def test_compact_of_nothing_is_refused(running: LiveServer, items: dict[str, Any]) -> None:
    answer = compact(running, {"model": "scripted"} | items)
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "input", "invalid_value")


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"input": "hi"}, 400, "model", "missing_required_parameter"),
        ({"model": None, "input": "hi"}, 400, "model", "invalid_type"),
        ({"model": "no", "input": "hi"}, 404, "model", "model_not_found"),
        (
            {"model": "scripted", "previous_response_id": "resp_no"},
            400,
            "previous_response_id",
            "previous_response_not_found",
        ),
        ({"model": "scripted", "input": 7}, 400, "input", "invalid_type"),
        (
            {"model": "scripted", "input": [{"role": "system", "content": "word " * 130_000}]},
            400,
            "input",
            "context_length_exceeded",
        ),
    ],
)
def test_compact_error_names_the_parameter(
    running: LiveServer, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    answer = compact(running, body)
    assert (answer.status, answer.json["error"]["param"], answer.json["error"]["code"]) == (status, param, code)


def test_compact_unknown_field_is_a_warning(running: LiveServer) -> None:
    answer = compact(running, {"model": "scripted", "input": "hi", "colour": "red"})
    assert (answer.status, "colour" in answer.headers["x-antiphon-warnings"]) == (200, True)


def test_official_client_compacts(running: LiveServer) -> None:
    with running.client() as client:
        compacted = client.responses.compact(model="scripted", input=LONG)
        # The SDK's type does not allow a user message in an output, but the API does.
        passed_back = [item.to_dict(warnings=False) for item in compacted.output]
        answer = client.responses.create(model="scripted", input=[*passed_back, say("recall")])  # type: ignore[list-item]
    assert answer.output_text == "It was to be red."


def test_compaction_of_another_project_is_not_readable(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, api_keys=(ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b")))
    item = compact(running, {"model": "scripted", "input": LONG}, key="sk-ada").json["output"][-1]
    assert get_text(ask(running, [item, say("recall")], key="sk-ada")) == "It was to be red."
    other = ask(running, [item, say("recall")], key="sk-bob")
    assert (get_text(other), item["id"] in other.headers["x-antiphon-warnings"]) == ("I do not know.", True)


def test_tampered_compaction_is_omitted_with_a_warning(running: LiveServer) -> None:
    item = compact(running, {"model": "scripted", "input": LONG}).json["output"][-1]
    middle = len(item["encrypted_content"]) // 2
    changed = item["encrypted_content"][:middle] + "AAAA" + item["encrypted_content"][middle + 4 :]
    answer = ask(running, [item | {"encrypted_content": changed}, say("recall")])
    assert (get_text(answer), item["id"] in answer.headers["x-antiphon-warnings"]) == ("I do not know.", True)


def test_stateless_server_compacts(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, stateless=True)
    output = compact(running, {"model": "scripted", "input": LONG}).json["output"]
    assert get_text(ask(running, [*output, say("recall")])) == "It was to be red."
