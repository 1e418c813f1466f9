"""The OpenAI Agents SDK for JavaScript against a real server: tools and a handoff, with state on either side."""

from typing import Any

import pytest

from support import tool_script

# The input grows with every turn, so the rule for the last turn comes first.
SCRIPT = {
    "models": ["scripted", "gpt-5"],
    "rules": [
        {"user": "once more", "text": "Mild at noon", "answers": ["As I said: mild."]},
        {
            "user": "a poem",
            "last_item": "function_call_output",
            "text": '"assistant":"poet"',
            "answers": ["Mild at noon, said the poet."],
        },
        {
            "user": "a poem",
            "last_item": "function_call_output",
            "answers": [[{"tool_call": {"name": "transfer_to_poet"}}]],
        },
        {
            "user": "a poem",
            "answers": [
                [
                    {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}},
                    {"tool_call": {"name": "get_time", "arguments": {"city": "Bern"}}},
                ]
            ],
        },
        {"user": "profile", "answers": ['{"name": "ada", "age": 36}']},
        {"user": "think", "last_item": "function_call_output", "answers": ["It is mild."]},
        {
            "user": "think",
            "answers": [
                [
                    {"summary": "A tool knows."},
                    {"reasoning": "Private reasoning."},
                    {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}},
                ]
            ],
        },
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
    ],
}
TEAM = {
    "text": "Mild at noon, said the poet.",
    "by": "poet",
    "calls": ["get_time Bern", "get_weather Bern"],
}
TWICE = {**TEAM, "again": "As I said: mild."}


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture(scope="module")
def only_functions(serve: Any) -> Any:
    return serve(tool_script.SCRIPT)


def test_run_continues_with_previous_response_id(node: Any, server: Any) -> None:
    assert node.run_case("agents", "chain", server) == TWICE


def test_run_continues_in_a_conversation(node: Any, server: Any) -> None:
    assert node.run_case("agents", "conversation", server) == {
        **TWICE,
        "items": [
            "message",
            *["function_call"] * 2,
            *["function_call_output"] * 2,
            "function_call",
            "function_call_output",
            "message",
            "message",
            "message",
        ],
    }


def test_run_continues_in_a_conversations_session(node: Any, server: Any) -> None:
    assert node.run_case("agents", "session", server) == {**TWICE, "count": 10, "last": "As I said: mild."}


def test_run_continues_over_websocket(node: Any, server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "antiphon.access")
    assert node.run_case("agents", "websocket", server) == TWICE
    lines = [record.getMessage() for record in caplog.records if record.name == "antiphon.access"]
    assert {line.split()[0] for line in lines} - {"GET"} == {"WS"}  # GET opens the connection


def test_streamed(node: Any, server: Any) -> None:
    assert node.run_case("agents", "streamed", server) == {
        **TEAM,
        "joined": "Mild at noon, said the poet.",
        "types": ["agent_updated_stream_event", "raw_model_stream_event", "run_item_stream_event"],
    }


def test_final_output_matches_its_type(node: Any, server: Any) -> None:
    assert node.run_case("agents", "structured", server) == {"name": "ada", "age": 36}


def test_encrypted_reasoning_is_returned_to_the_model(node: Any, server: Any) -> None:
    assert node.run_case("agents", "reasoning", server) == {
        "text": "It is mild.",
        "items": ["reasoning_item", "tool_call_item", "tool_call_output_item", "message_output_item"],
    }
    thought = server.backend.last_item("reasoning")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Private reasoning."}]


def test_run_continues_after_approval(node: Any, server: Any) -> None:
    assert node.run_case("agents", "approval", server) == {
        "before": [],
        "text": "It is mild.",
        "after": ["get_weather Bern"],
    }


def test_session_continues_after_server_compaction(node: Any, server: Any) -> None:
    # The SDK compacts only for model names that it knows.
    assert node.run_case("agents", "compaction", server, model="gpt-5") == {
        "items": ["message", "compaction"],
        "text": "Your name is ada.",
    }


@pytest.mark.parametrize(
    ("tool", "output"),
    [("shell", "ran ls"), ("apply_patch", "created a.txt"), ("namespace", "mild"), ("search", "mild")],
)
def test_sdk_tools_work_on_a_model_with_only_functions(node: Any, only_functions: Any, tool: str, output: str) -> None:
    assert node.run_case("agents", tool, only_functions) == f"It said {output}."


def test_embedded_model_calls_a_tool(node: Any, embedded: Any) -> None:
    assert node.run_case("agents", "embedded", embedded, model="smollm2-135m") == {
        "text": "mild",
        "calls": ["get_weather"],
    }
