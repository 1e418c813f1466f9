"""The AI SDK against a real server, with all client-side features of its OpenAI provider."""

from typing import Any

import pytest

from support import tool_script

SCRIPT = {
    "rules": [
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "profile", "answers": ['{"name": "ada", "age": 36}']},
        {"last_item": "function_call_output", "text": "mild", "answers": ["It is mild."]},
        {
            "user": "weather",
            "answers": [
                [
                    {"summary": ["A tool knows.", "I call it."]},
                    {"reasoning": "Private reasoning."},
                    {"tool_call": {"name": "get_weather", "arguments": ['{"city":', ' "Bern"}']}},
                ]
            ],
        },
        {"user": "what is this", "answers": ["A red dot."]},
        {"user": "slowly", "answers": [[{"text": ["first"]}, {"delay": 0.1}, {"text": [" last"]}]]},
        {"user": "short", "answers": [[{"text": "cut"}, {"finish": "length"}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "server_error"}}]]},
        {
            "user": "too much",
            "answers": [
                [{"raise": {"status": 429, "type": "rate_limit_error", "code": "slow_down", "message": "One by one."}}]
            ],
        },
        {
            "user": "surely",
            "answers": [
                [
                    {
                        "tokens": [
                            {"token": "Yes", "logprob": -0.1, "top_logprobs": [{"token": "Yes", "logprob": -0.1}]},
                        ]
                    }
                ]
            ],
        },
        {
            "user": "cite",
            "answers": [
                [
                    {"text": "See there."},
                    {
                        "annotation": {
                            "type": "url_citation",
                            "url": "http://127.0.0.1/there",
                            "title": "There",
                            "start_index": 4,
                            "end_index": 9,
                        }
                    },
                ]
            ],
        },
    ],
}
THOUGHTFUL = {
    "text": "It is mild.",
    "steps": [["tool-calls", "reasoning", "reasoning", "tool-call", "tool-result"], ["stop", "text"]],
    "thoughts": ["A tool knows.I call it.", None],
}


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture(scope="module")
def only_functions(serve: Any) -> Any:
    return serve(tool_script.SCRIPT)


def test_answer_has_usage_and_no_warnings(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "generate", server) == {
        "text": "You said: hello there",
        "finishReason": "stop",
        "usage": [4, 4],
        "warnings": [],
        "id": "resp_",
    }


def test_stream_has_all_parts(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "stream", server) == {
        "types": [
            "start",
            "start-step",
            "text-start",
            *["text-delta"] * 4,
            "text-end",
            "finish-step",
            "finish",
        ],
        "joined": "You said: hello there",
        "text": "You said: hello there",
        "finishReason": "stop",
        "usage": [2, 4],
    }


@pytest.mark.parametrize("case", ["stored", "unstored"])
def test_reasoning_is_returned_with_a_tool_output(node: Any, server: Any, case: str) -> None:
    assert node.run_case("ai_sdk", case, server) == THOUGHTFUL
    thought = server.backend.last_item("reasoning")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Private reasoning."}]
    assert server.backend.last_item("function_call_output")["output"] == "mild in Bern"


def test_reasoning_and_calls_are_streamed(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "streamed", server) == {
        "types": [
            "start",
            "start-step",
            "reasoning-start",
            "reasoning-delta",
            "reasoning-end",
            "tool-input-start",
            "tool-input-delta",
            "tool-input-end",
            "tool-call",
            "tool-result",
            "finish-step",
            "text-start",
            "text-delta",
            "text-end",
            "finish",
        ],
        **THOUGHTFUL,
    }


def test_objects_match_their_schema_whole_and_streamed(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "object", server) == [{"name": "ada", "age": 36}] * 4
    text_format = server.backend.turns[-1].request.text.format
    assert (text_format.type, sorted(text_format.schema["properties"]), text_format.strict) == (
        "json_schema",
        ["age", "name"],
        True,
    )


def test_response_is_continued_by_its_id(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "chain", server) == ["Your name is ada.", True]


def test_history_from_the_client_is_used(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "history", server) == "Your name is ada."
    assert [item["role"] for item in server.backend.input_items()[-1]] == ["user", "assistant", "user"]


def test_image_reaches_the_model(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "image", server) == "A red dot."
    _, image = server.backend.last_item("message")["content"]
    assert (image["type"], image["detail"], image["image_url"][:26]) == (
        "input_image",
        "low",
        "data:image/png;base64,iVBO",
    )


def test_logprobs_are_returned(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "logprobs", server) == [
        [{"token": "Yes", "logprob": -0.1, "top_logprobs": [{"token": "Yes", "logprob": -0.1}]}]
    ]


def test_citations_are_sources(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "sources", server) == [["url", "http://127.0.0.1/there", "There"]]


def test_errors_have_their_status_and_body(node: Any, server: Any) -> None:
    unknown = "The model 'unknown' does not exist. Available models: 'scripted'."
    assert node.run_case("ai_sdk", "errors", server) == [
        [
            "AI_APICallError",
            404,
            False,
            {"message": unknown, "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
            unknown,
        ],
        [
            "AI_APICallError",
            429,
            True,
            {"message": "One by one.", "type": "rate_limit_error", "param": None, "code": "slow_down"},
            "One by one.",
        ],
    ]


def test_failed_and_incomplete_answers_are_reported(node: Any, server: Any) -> None:
    assert node.run_case("ai_sdk", "breakdown", server) == {
        "failed": "AI_APICallError",
        "errors": ["No."],
        "last": "error",
        "short": ["length", "cut"],
    }


def test_keepalive_events_are_ignored(node: Any, serve: Any) -> None:
    server = serve(SCRIPT, keepalive_seconds=0.01)
    assert node.run_case("ai_sdk", "keepalive", server) == {"has_keepalive": True, "text": "first last"}


@pytest.mark.parametrize(
    ("tool", "output", "steps"),
    [
        ("draw", "drew a cat", [["tool-calls", "tool-call", "tool-result"], ["stop", "text"]]),
        # The SDK executes the shell, but its finish reason is not "tool-calls".
        ("shell", "ran ls", [["stop", "tool-call", "tool-result"], ["stop", "text"]]),
        ("apply_patch", "created a.txt", [["tool-calls", "tool-call", "tool-result"], ["stop", "text"]]),
        ("namespace", "mild", [["tool-calls", "tool-call", "tool-result"], ["stop", "text"]]),
        ("search", "mild", [["tool-calls", *["tool-call", "tool-result"] * 2], ["stop", "text"]]),
    ],
)
def test_sdk_tools_work_on_a_model_with_only_functions(
    node: Any, only_functions: Any, tool: str, output: str, steps: list[list[str]]
) -> None:
    assert node.run_case("ai_sdk", tool, only_functions) == [{"text": f"It said {output}.", "steps": steps}] * 2


def test_embedded_model_streams_calls_tools_and_fits_a_schema(node: Any, embedded: Any) -> None:
    result = node.run_case("ai_sdk", "embedded", embedded, model="smollm2-135m")
    assert result == {
        "text": result["joined"],
        "joined": result["text"],
        "calls": [["get_weather", ["city"]]],
        "results": 1,
        "object": ["name", "age"],
    }
    assert "Paris" in result["text"]
