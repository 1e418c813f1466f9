"""`--stateless`: the behaviour of contract lines S3.1 to S3.7 and S3.12 to S3.17. Test names cite the line."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from antiphon.stream.sse import SseDecoder
from support.live_server import LiveServer, make_settings

SCRIPT = {
    "rules": [
        {
            "user": "both",
            "answers": [[{"text": ["Let me look."]}, {"tool_call": {"name": "f", "arguments": ["{", "}"]}}]],
        },
        {"user": "two calls", "answers": [[{"tool_call": {"name": "f"}}, {"tool_call": {"name": "f"}}]]},
        {
            "user": "think",
            "answers": [
                [
                    {"reasoning": "Hm."},
                    {"summary": "Thought."},
                    {"seal": "sealed"},
                    {"item": {"type": "reasoning", "id": "rs_1", "summary": []}},
                    {"text": ["So."]},
                    {"annotation": {"type": "file_path", "file_id": "file_1", "index": 0}},
                ]
            ],
        },
        {"user": "break", "answers": [[{"text": ["So far"]}, {"failure": {"message": "No.", "code": "overloaded"}}]]},
        {"user": "crash", "answers": [[{"text": ["So far"]}, {"crash": "a secret of the inside"}]]},
    ]
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
HINT = "Please send full conversation history in the input array."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    running = LiveServer(SCRIPT, make_settings(stateless=True, stateless_id_prefix="AM-"))
    yield running
    running.stop()


def ask(server: Any, input_items: Any = "hello", **fields: Any) -> Any:
    return server.ask("POST", "/v1/responses", {"model": "scripted", "input": input_items} | fields)


def stream(server: Any, input_items: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    answer = ask(server, input_items, stream=True, **fields)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    messages = SseDecoder().feed(answer.body)
    assert messages[-1].data == b"[DONE]"
    events = [json.loads(message.data) for message in messages[:-1]]
    assert [event["type"] for event in events] == [message.event for message in messages[:-1]]
    return events


def test_s3_1_response_is_json_or_a_stream(server: Any) -> None:
    answer = ask(server)
    assert (answer.status, answer.headers["content-type"], answer.json["status"]) == (
        200,
        "application/json",
        "completed",
    )
    assert stream(server)[-1]["response"]["output"][0]["content"] == answer.json["output"][0]["content"]


@pytest.mark.parametrize("streamed", [False, True])
def test_s3_2_validation_comes_first(server: Any, streamed: bool) -> None:
    answer = ask(server, previous_response_id="resp_1", model="nobody", stream=streamed)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")


def test_s3_3_missing_model_is_refused(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"input": "hello"})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"], error["code"]) == (
        400,
        "invalid_request_error",
        "model",
        "missing_required_parameter",
    )


def test_s3_3_neither_input_nor_instructions_is_refused(server: Any) -> None:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted"})
    error = answer.json["error"]
    assert (answer.status, error["param"], error["message"]) == (
        400,
        "input",
        "Either input or instructions is required.",
    )


def test_s3_3_instructions_alone_are_enough(server: Any) -> None:
    assert server.ask("POST", "/v1/responses", {"model": "scripted", "instructions": "Greet."}).status == 200


@pytest.mark.parametrize(
    ("fields", "name", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation", "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
            "item_reference",
            "input[1]",
        ),
    ],
)
def test_s3_4_stateful_parameter_is_refused_with_a_hint(
    server: Any, fields: dict[str, Any], name: str, param: str
) -> None:
    answer = ask(server, **fields)
    assert (answer.status, answer.json) == (
        400,
        {
            "error": {
                "message": f"{name} is not supported. This server keeps no state between requests. {HINT}",
                "type": "invalid_request_error",
                "param": param,
                "code": "unsupported_parameter",
            }
        },
    )


def test_s3_4_nothing_is_stored(server: Any) -> None:
    made = ask(server, store=True).json
    assert made["store"] is False
    path = f"/v1/responses/{made['id']}"
    assert [server.ask("GET", path).status, server.ask("DELETE", path).status] == [404, 404]
    assert server.ask("POST", f"{path}/cancel").status == 404
    assert server.ask("GET", f"{path}/input_items").status == 404
    error = server.ask("POST", "/v1/conversations", {}).json["error"]
    message = "Unknown path: /v1/conversations. This server keeps no state between requests."
    assert (error["code"], error["message"]) == ("unknown_url", message)


def test_s3_4_history_in_the_input_array_is_used(server: Any) -> None:
    history = [
        {"role": "user", "content": "call f"},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        {"role": "user", "content": "and now?"},
    ]
    assert ask(server, history).json["output"][0]["content"][0]["text"] == "You said: and now?"


def test_s3_5_unknown_model_is_not_found(server: Any) -> None:
    answer = ask(server, model="nobody")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


def test_s3_6_server_error_is_500_and_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon")
    answer = ask(server, "crash")
    assert (answer.status, answer.json["error"]["code"]) == (500, "server_error")
    assert b"secret" not in answer.body
    assert "a secret of the inside" in caplog.text


@pytest.mark.parametrize(("input_items", "message"), [("break", "No."), ("crash", "The server had an internal error")])
def test_s3_7_broken_stream_ends_with_an_empty_failed_response(server: Any, input_items: str, message: str) -> None:
    error, last = stream(server, input_items)[-2:]
    response = last["response"]
    assert (last["type"], response["status"], response["output"], response["usage"]) == (
        "response.failed",
        "failed",
        [],
        None,
    )
    assert response["error"]["code"] == "server_error"
    assert response["error"]["message"].startswith(message)
    assert error["error"] == {"param": None} | response["error"]


OTHERS: dict[str, dict[str, Any]] = {
    "file_search": {"vector_store_ids": ["vs_1"]},
    "web_search_preview": {},
    "code_interpreter": {"container": {"type": "auto"}},
    "computer_use_preview": {"display_height": 1, "display_width": 1, "environment": "linux"},
    "image_gen": {},
    "local_shell": {},
    "mcp": {"server_label": "l", "server_url": "http://127.0.0.1/mcp"},
    "custom": {"name": "c"},
    "shell": {},
    "apply_patch": {},
}


def test_s3_12_only_functions_are_used_and_dropped_tools_are_listed(server: Any) -> None:
    others = [{"type": kind} | fields for kind, fields in OTHERS.items()]
    answer = ask(server, tools=[*others, FUNCTION])
    assert [tool["name"] for tool in answer.json["tools"]] == ["f"]
    assert answer.headers["x-antiphon-warnings"] == "; ".join(
        f"tools[{index}]: {kind} is not available here and was left out" for index, kind in enumerate(OTHERS)
    )


TEXT = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def test_s3_10_text_is_a_message_and_call_is_an_item(server: Any) -> None:
    message, call = ask(server, "both", tools=[FUNCTION]).json["output"]
    assert message == {
        "type": "message",
        "id": message["id"],
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        "status": "completed",
    }
    assert call == {
        "type": "function_call",
        "id": call["id"],
        "call_id": call["call_id"],
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }


def test_s3_13_order_of_events(server: Any) -> None:
    types = [event["type"] for event in stream(server, "both", tools=[FUNCTION])]
    types.remove("response.function_call_arguments.delta")  # there are two
    assert types == ["response.created", "response.in_progress", *TEXT, *CALL, "response.completed"]


def test_s3_14_message_is_closed_before_a_call(server: Any) -> None:
    events = stream(server, "both", tools=[FUNCTION])
    items = [(event["type"], event["output_index"]) for event in events if "output_item" in event["type"]]
    assert items == [
        ("response.output_item.added", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.output_item.done", 1),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


def test_s3_15_parameter_without_effect_is_accepted_and_listed(server: Any) -> None:
    answer = ask(
        server,
        store=True,
        include=["reasoning.encrypted_content"],
        background=True,
        prompt_cache_key="k",
        service_tier="flex",
        reasoning={"effort": "high", "generate_summary": "auto"},
    )
    assert (answer.status, answer.json["status"], answer.json["background"]) == (200, "completed", False)
    assert answer.headers["x-antiphon-warnings"] == (
        "ignored: store, include, background, prompt_cache_key, service_tier, "
        "reasoning.effort, reasoning.generate_summary"
    )


def test_s3_15_default_behaviour_is_not_listed(server: Any) -> None:
    answer = ask(server, store=False, include=[], background=False, reasoning={})
    assert (answer.status, answer.headers.get("x-antiphon-warnings")) == (200, None)


def test_s3_15_unstored_background_response_is_accepted(server: Any) -> None:
    assert ask(server, store=False, background=True).json["status"] == "completed"


def test_s3_16_reasoning_and_annotations_are_omitted(server: Any) -> None:
    events = stream(server, "think")
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        *TEXT,
        "response.completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "So.", "annotations": []}]


def test_s3_17_ids_have_the_prefix(server: Any) -> None:
    response = ask(server, "both", tools=[FUNCTION]).json
    message, call = response["output"]
    for value, pattern in (
        (response["id"], r"resp_AM-\d{13}-[a-z0-9]{8}"),
        (message["id"], r"msg_AM-[a-z0-9]{12}"),
        (call["id"], r"fc_AM-[a-z0-9]{12}"),
        (call["call_id"], r"call_AM-[a-z0-9]{12}"),
    ):
        assert re.fullmatch(pattern, value)


def test_s3_17_ids_differ(server: Any) -> None:
    first, second = (ask(server, "two calls", tools=[FUNCTION]).json for _ in range(2))
    ids = [first["id"], second["id"], *(call["call_id"] for made in (first, second) for call in made["output"])]
    assert len(set(ids)) == 6


def test_s3_17_ids_without_a_prefix_are_the_standard_ones(serve: Any) -> None:
    running = serve(stateless=True)
    assert re.fullmatch(r"resp_[0-9a-f]{44}", ask(running).json["id"])


def test_sdk_error_of_a_stateless_server_has_the_hint(server: Any) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError, match=HINT) as caught:
        client.responses.create(model="scripted", input="hi", previous_response_id="resp_1")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "previous_response_id")


def test_stateless_server_counts_input_tokens(server: Any) -> None:
    count = {"model": "scripted", "input": "one two"}
    assert server.ask("POST", "/v1/responses/input_tokens", count).json["input_tokens"] == 2
    refused = server.ask("POST", "/v1/responses/input_tokens", count | {"previous_response_id": "resp_1"})
    assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_parameter")
