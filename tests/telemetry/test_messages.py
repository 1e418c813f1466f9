"""Items of the Responses API as messages of OpenTelemetry's conventions."""

from typing import Any

import pytest

from antiphon.telemetry.messages import find_finish_reason, make_input_messages, make_output_messages

CALL = {"type": "function_call", "call_id": "call_1", "name": "act", "arguments": "{}"}


@pytest.mark.parametrize(
    ("item", "role", "parts"),
    [
        ({"role": "user", "content": "Hi."}, "user", [{"type": "text", "content": "Hi."}]),
        ({"role": "developer", "content": "Be kind."}, "system", [{"type": "text", "content": "Be kind."}]),
        (
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            "assistant",
            [{"type": "text", "content": "No."}],
        ),
        (CALL, "assistant", [{"type": "tool_call", "id": "call_1", "name": "act", "arguments": {}}]),
        (
            CALL | {"arguments": "{"},
            "assistant",
            [{"type": "tool_call", "id": "call_1", "name": "act", "arguments": "{"}],
        ),
        (
            {"type": "custom_tool_call", "call_id": "call_1", "name": "act", "input": "now"},
            "assistant",
            [{"type": "tool_call", "id": "call_1", "name": "act", "arguments": "now"}],
        ),
        (
            {"type": "function_call_output", "call_id": "call_1", "output": "done"},
            "tool",
            [{"type": "tool_call_response", "id": "call_1", "response": "done"}],
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "secret"},
            "assistant",
            [{"type": "reasoning", "content": "Hm."}],
        ),
        ({"type": "web_search_call", "id": "ws_1"}, "assistant", [{"type": "web_search_call", "id": "ws_1"}]),
    ],
)
def test_item_becomes_a_message(item: dict[str, Any], role: str, parts: list[dict[str, Any]]) -> None:
    assert make_input_messages([item]) == [{"role": role, "parts": parts}]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "input_image", "image_url": "https://example.com/a.png"},
            {"type": "uri", "modality": "image", "uri": "https://example.com/a.png"},
        ),
        (
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "", "size": 26},
        ),
        (
            {"type": "input_file", "file_id": "file_1"},
            {"type": "file", "modality": "document", "file_id": "file_1"},
        ),
        ({"type": "input_audio", "data": "AAAA"}, {"type": "input_audio"}),
    ],
)
def test_data_of_files_is_not_recorded(part: dict[str, Any], expected: dict[str, Any]) -> None:
    assert make_input_messages([{"role": "user", "content": [part]}]) == [{"role": "user", "parts": [expected]}]


def test_calls_of_one_turn_are_one_message() -> None:
    items = [{"role": "user", "content": "Go."}, CALL, CALL | {"call_id": "call_2"}]
    assert [(each["role"], len(each["parts"])) for each in make_input_messages(items)] == [
        ("user", 1),
        ("assistant", 2),
    ]
    assert make_input_messages("Go.") == make_input_messages([{"role": "user", "content": "Go."}])


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": "completed", "output": [{"type": "message"}]}, "stop"),
        ({"status": "completed", "output": [CALL]}, "tool_call"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "incomplete", "incomplete_details": None}, "incomplete"),
        ({"status": "failed"}, "error"),
    ],
)
def test_finish_reason_is_that_of_the_conventions(response: dict[str, Any], reason: str) -> None:
    assert find_finish_reason(response) == reason


def test_output_is_one_message_with_its_finish_reason() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I act."}]}
    (made,) = make_output_messages([message, CALL], "tool_call")
    assert (made["role"], [part["type"] for part in made["parts"]], made["finish_reason"]) == (
        "assistant",
        ["text", "tool_call"],
        "tool_call",
    )
