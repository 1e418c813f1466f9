"""The agents SDK for JavaScript against a real server: tools and a handoff, with the state wherever it may be."""

from typing import Any

import pytest

from clients import tool_script

# What the model reads grows from turn to turn, so the rule for the latest turn comes first.
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
                    {"reasoning": "Nobody must read this."},
                    {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}},
                ]
            ],
        },
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
    ],
}
TROUPE = {
    "text": "Mild at noon, said the poet.",
    "by": "poet",
    "asked": ["get_time Bern", "get_weather Bern"],
}
TWICE = {**TROUPE, "again": "As I said: mild."}


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture(scope="module")
def only_functions(serve: Any) -> Any:
    return serve(tool_script.SCRIPT)


def test_on_previous_response_id(node: Any, server: Any) -> None:
    assert node.play("agents", "chain", server) == TWICE


def test_on_a_conversation(node: Any, server: Any) -> None:
    assert node.play("agents", "conversation", server) == {
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


def test_on_a_session_that_is_a_conversation(node: Any, server: Any) -> None:
    assert node.play("agents", "session", server) == {**TWICE, "count": 10, "last": "As I said: mild."}


def test_on_a_websocket(node: Any, server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "antiphon.access")
    assert node.play("agents", "websocket", server) == TWICE
    lines = [record.getMessage() for record in caplog.records if record.name == "antiphon.access"]
    assert {line.split()[0] for line in lines} - {"GET"} == {"WS"}  # GET opens the connection


def test_streamed(node: Any, server: Any) -> None:
    assert node.play("agents", "streamed", server) == {
        **TROUPE,
        "joined": "Mild at noon, said the poet.",
        "types": ["agent_updated_stream_event", "raw_model_stream_event", "run_item_stream_event"],
    }


def test_the_final_output_fits_its_type(node: Any, server: Any) -> None:
    assert node.play("agents", "structured", server) == {"name": "ada", "age": 36}


def test_reasoning_goes_back_sealed_to_the_model_that_thought_it(node: Any, server: Any) -> None:
    assert node.play("agents", "reasoning", server) == {
        "text": "It is mild.",
        "items": ["reasoning_item", "tool_call_item", "tool_call_output_item", "message_output_item"],
    }
    thought = server.backend.last_item("reasoning")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Nobody must read this."}]


def test_a_run_that_waited_for_approval_goes_on(node: Any, server: Any) -> None:
    assert node.play("agents", "approval", server) == {
        "before": [],
        "text": "It is mild.",
        "after": ["get_weather Bern"],
    }


def test_a_session_that_the_server_has_compacted_goes_on(node: Any, server: Any) -> None:
    # It refuses to have models compacted whose names it does not know.
    assert node.play("agents", "compaction", server, model="gpt-5") == {
        "kept": ["message", "compaction"],
        "text": "Your name is ada.",
    }


@pytest.mark.parametrize(
    ("tool", "heard"),
    [("shell", "ran ls"), ("apply_patch", "created a.txt"), ("namespace", "mild"), ("search", "mild")],
)
def test_its_own_tools_work_on_a_model_that_only_knows_functions(
    node: Any, only_functions: Any, tool: str, heard: str
) -> None:
    assert node.play("agents", tool, only_functions) == f"It said {heard}."


def test_the_embedded_model_calls_a_tool(node: Any, embedded: Any) -> None:
    assert node.play("agents", "embedded", embedded, model="smollm2-135m") == {"text": "mild", "asked": ["get_weather"]}
