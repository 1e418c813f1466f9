"""The OpenAI SDK for JavaScript against a real server."""

from typing import Any

import pytest

SCRIPT = {
    "rules": [
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "profile", "answers": ['{"name": "ada", "age": 36}']},
        {"last_item": "function_call_output", "text": "mild", "answers": ["It is mild."]},
        {
            "user": "weather",
            "answers": [
                [
                    {"summary": "A tool knows."},
                    {"reasoning": "Private reasoning."},
                    {"tool_call": {"name": "get_weather", "arguments": ['{"city":', ' "Bern"}']}},
                ]
            ],
        },
        {"user": "what is this", "answers": ["A red dot."]},
        {"user": "wait", "answers": [[{"text": ["first"]}, {"wait": "gate"}, {"text": [" last"]}]]},
        {"user": "slowly", "answers": [[{"text": ["first"]}, {"delay": 0.1}, {"text": [" last"]}]]},
        {"user": "short", "answers": [[{"text": "cut"}, {"finish": "length"}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "server_error"}}]]},
        {
            "user": "too much",
            "answers": [
                [{"raise": {"status": 429, "type": "rate_limit_error", "code": "slow_down", "message": "One by one."}}]
            ],
        },
    ],
}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 4,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


def test_chain_is_continued_stored_and_deleted(node: Any, server: Any) -> None:
    assert node.run_case("openai", "chain", server) == {
        "texts": ["You said: my name is ada", "Your name is ada.", "Your name is ada."],
        "follows": True,
        "items": ["recall"],
        "gone": "NotFoundError",
    }


def test_stream_has_all_events_in_order(node: Any, server: Any) -> None:
    assert node.run_case("openai", "stream", server) == {
        "raw": TEXT_EVENTS,
        "helper": TEXT_EVENTS,
        "numbers": list(range(len(TEXT_EVENTS))),
        "texts": ["You said: hello there"] * 4,
        "status": "completed",
    }


def test_answer_is_parsed_whole_and_streamed(node: Any, server: Any) -> None:
    assert node.run_case("openai", "parse", server) == [{"name": "ada", "age": 36}] * 2


def test_encrypted_reasoning_is_returned_to_the_model(node: Any, server: Any) -> None:
    assert node.run_case("openai", "reasoning", server) == {
        "types": ["reasoning", "function_call"],
        "summary": [{"type": "summary_text", "text": "A tool knows."}],
        "sealed": "string",
        "call": ["get_weather", {"city": "Bern"}],
        "text": "It is mild.",
    }
    thought = server.backend.last_item("reasoning")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Private reasoning."}]


def test_tool_runner_calls_a_function_and_continues(node: Any, server: Any) -> None:
    assert node.run_case("openai", "runner", server) == {"texts": ["It is mild."] * 2, "joined": "It is mild."}
    assert server.backend.last_item("function_call_output")["output"] == "mild in Bern"


def test_image_reaches_the_model(node: Any, server: Any) -> None:
    assert node.run_case("openai", "image", server) == "A red dot."
    _, image = server.backend.last_item("message")["content"]
    assert (image["type"], image["detail"], image["image_url"][:26]) == (
        "input_image",
        "low",
        "data:image/png;base64,iVBO",
    )


def test_background_response_is_followed_and_resumed(node: Any, server: Any) -> None:
    assert node.run_case("openai", "background", server) == {
        "status": "queued",
        "types": ["response.created", "response.queued", *TEXT_EVENTS[1:]],
        "resumed": True,
        "text": "You said: hello there",
    }


def test_background_response_is_cancelled(node: Any, server: Any) -> None:
    assert node.run_case("openai", "cancel", server) == ["cancelled", "first"]


def test_conversation_is_created_updated_used_and_deleted(node: Any, server: Any) -> None:
    assert node.run_case("openai", "conversation", server) == {
        "metadata": [{"topic": "names"}, {"topic": "people"}],
        "text": "Your name is ada.",
        "items": ["my name is ada", "recall", "Your name is ada."],
        "left": 2,
        "deleted": True,
        "gone": "NotFoundError",
    }


def test_errors_have_their_class_and_parameter(node: Any, server: Any) -> None:
    assert node.run_case("openai", "errors", server) == [
        ["NotFoundError", 404, "invalid_request_error", "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_request_error", "previous_response_not_found", "previous_response_id"],
        *[["RateLimitError", 429, "rate_limit_error", "slow_down", None]] * 2,
    ]


def test_failed_and_incomplete_answers_are_reported(node: Any, server: Any) -> None:
    assert node.run_case("openai", "breakdown", server) == {
        "failed": ["failed", {"code": "server_error", "message": "No.", "type": "server_error"}],
        "broken": ["APIError", "server_error", "No."],
        "short": ["incomplete", {"reason": "max_output_tokens"}, "cut"],
    }


def test_keepalive_events_are_ignored(node: Any, serve: Any) -> None:
    server = serve(SCRIPT, keepalive_seconds=0.01)
    assert node.run_case("openai", "keepalive", server) == {"has_keepalive": True, "text": "first last"}


def test_websocket_turns_continue_without_being_stored(node: Any, server: Any) -> None:
    assert node.run_case("openai", "websocket", server) == {
        "texts": ["You said: my name is ada", "Your name is ada."],
        "types": TEXT_EVENTS,
    }


def test_embedded_model_streams_calls_tools_and_fits_a_schema(node: Any, embedded: Any) -> None:
    result = node.run_case("openai", "embedded", embedded, model="smollm2-135m")
    assert result == {
        "text": result["joined"],
        "joined": result["text"],
        "calls": [["function_call", "get_weather", ["city"]]],
        "parsed": ["name", "age"],
    }
    assert "Paris" in result["text"]
