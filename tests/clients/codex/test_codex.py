"""Codex CLI against a real server, over HTTP and WebSocket. Tool calls of the model are executed."""

import base64
import json
from typing import Any

import pytest

pytestmark = pytest.mark.parametrize("transport", ["http", "websocket"])


def test_answer_is_shown(codex: Any, transport: str) -> None:
    agent = codex({"rules": [{"user": "hello", "answers": ["Hello from the script."]}]})
    outcome = agent.run("hello", transport=transport)
    assert outcome.messages == ["Hello from the script."]
    assert [item for item in outcome.items if item["type"] == "error"] == []
    assert [event["type"] for event in outcome.events] == [
        "thread.started",
        "turn.started",
        "item.completed",
        "turn.completed",
    ]


SHELL = {
    "rules": [
        {"last_item": "function_call_output", "text": "left-right", "answers": ["It printed left-right."]},
        {"last_item": "function_call_output", "answers": ["The output is lost."]},
        {
            "user": "print",
            "answers": [
                [
                    {"text": "I print."},
                    {
                        "tool_call": {
                            "name": "exec_command",
                            "arguments": {"cmd": "printf '%s-%s' left right | tee out"},
                        }
                    },
                ]
            ],
        },
    ]
}


def test_shell_command_runs_and_its_output_is_read(codex: Any, transport: str) -> None:
    agent = codex(SHELL)
    outcome = agent.run("print something", transport=transport)
    assert outcome.messages == ["I print.", "It printed left-right."]
    (command,) = [item for item in outcome.items if item["type"] == "command_execution"]
    assert (command["aggregated_output"], command["exit_code"], command["status"]) == ("left-right", 0, "completed")
    assert (agent.work / "out").read_text() == "left-right"
    assert ("POST" in agent.methods, "WS" in agent.methods) == (transport == "http", transport == "websocket")


def test_reasoning_is_sent_back_to_the_model(codex: Any, transport: str) -> None:
    call = {"name": "exec_command", "arguments": {"cmd": "true"}}
    agent = codex(
        {
            "rules": [
                {"last_item": "function_call_output", "answers": ["Done."]},
                {"user": "think", "answers": [[{"reasoning": "Private reasoning."}, {"tool_call": call}]]},
            ]
        }
    )
    outcome = agent.run("Please think.", transport=transport)
    assert outcome.messages == ["Done."]
    thought = agent.model.last_item("reasoning")
    assert thought["content"] == [{"type": "reasoning_text", "text": "Private reasoning."}]


def test_unsupported_web_search_is_dropped(codex: Any, transport: str) -> None:
    agent = codex({"default": "I know it anyway."}, only_functions=True)
    outcome = agent.run("Search!", transport=transport, settings={"web_search": "live"})
    assert outcome.messages == ["I know it anyway."]


def test_output_schema_becomes_the_text_format(codex: Any, transport: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    agent = codex({"default": '{"city": "Bern"}'})
    (agent.work / "schema.json").write_text(json.dumps(schema))
    outcome = agent.run("Where?", "--output-schema", "schema.json", "-o", "answer.json", transport=transport)
    assert outcome.messages == ['{"city": "Bern"}']
    assert json.loads((agent.work / "answer.json").read_text()) == {"city": "Bern"}
    text_format = agent.model.turns[-1].request.text.format
    assert (text_format.type, text_format.schema, text_format.strict) == ("json_schema", schema, True)


# A red dot.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)


def test_image_reaches_the_model(codex: Any, transport: str) -> None:
    agent = codex({"rules": [{"user": "What is this", "answers": ["A red dot."]}]})
    (agent.work / "dot.png").write_bytes(PIXEL)
    outcome = agent.run("What is this?", "-i", "dot.png", transport=transport)
    assert outcome.messages == ["A red dot."]
    (image,) = [part for part in agent.model.last_item("message")["content"] if part["type"] == "input_image"]
    kind, data = image["image_url"].split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")


PATCH = """\
*** Begin Patch
*** Update File: greeting.txt
@@
-Good morning
+Good evening
*** Add File: more.txt
+Sleep well
*** End Patch
"""


def test_patch_is_applied_by_a_custom_tool_with_a_grammar(codex: Any, transport: str) -> None:
    agent = codex(
        {
            "rules": [
                {"last_item": "custom_tool_call_output", "text": "Success", "answers": ["It is evening now."]},
                {"user": "evening", "answers": [[{"custom_tool_call": {"name": "apply_patch", "input": PATCH}}]]},
            ]
        }
    )
    (agent.work / "greeting.txt").write_text("Good morning\nand good luck\n")
    outcome = agent.run("Make it evening.", transport=transport)
    assert outcome.messages == ["It is evening now."]
    assert (agent.work / "greeting.txt").read_text() == "Good evening\nand good luck\n"
    assert (agent.work / "more.txt").read_text() == "Sleep well\n"
    offered = {tool.name: tool for tool in agent.model.turns[0].request.tools if tool.type == "custom"}
    assert offered["apply_patch"].format.syntax == "lark"


def test_patch_is_applied_on_a_model_with_only_functions(codex: Any, transport: str) -> None:
    call = {"name": "apply_patch", "arguments": {"input": PATCH}}
    agent = codex(
        {
            "rules": [
                {"last_item": "function_call_output", "text": "Success", "answers": ["It is evening now."]},
                {"user": "evening", "answers": [[{"tool_call": call}]]},
            ]
        },
        only_functions=True,
    )
    (agent.work / "greeting.txt").write_text("Good morning\n")
    assert agent.run("Make it evening.", transport=transport).messages == ["It is evening now."]
    assert (agent.work / "greeting.txt").read_text() == "Good evening\n"
    assert {tool.type for tool in agent.model.turns[0].request.tools} == {"function"}


@pytest.mark.parametrize(
    ("call", "only_functions"),
    [
        ({"namespace": "multi_agent_v1", "name": "close_agent"}, False),
        ({"name": "multi_agent_v1__close_agent"}, True),
    ],
)
def test_namespace_tool_is_called(codex: Any, transport: str, call: dict[str, str], only_functions: bool) -> None:
    agent = codex(
        {
            "rules": [
                {"last_item": "function_call_output", "answers": ["So be it."]},
                {"user": "close", "answers": [[{"tool_call": {**call, "arguments": {"target": "unknown"}}}]]},
            ]
        },
        only_functions=only_functions,
    )
    assert agent.run("Please close it.", transport=transport).messages == ["So be it."]
    # Codex has executed the tool: the error is its own.
    assert agent.model.last_item("function_call_output")["output"].startswith("invalid agent id unknown")


def test_session_is_resumed_with_its_history(codex: Any, transport: str) -> None:
    agent = codex(
        {
            "rules": [
                {"user": "number", "text": "I say seven.", "answers": ["It was seven."]},
                {"user": "Choose", "answers": ["I say seven."]},
            ]
        }
    )
    first = agent.run("Choose.", transport=transport)
    second = agent.run("resume", first.thread, "Which number was it?", transport=transport)
    assert (first.messages, second.messages) == (["I say seven."], ["It was seven."])
    assert second.thread == first.thread


LONG = {
    "rules": [
        {"user": {"regex": "^What was it"}, "text": "They agreed on seven.", "answers": ["It was seven."]},
        {"user": {"regex": "^What was it"}, "answers": ["I forgot."]},
        {
            "last_item": "function_call_output",
            "answers": [
                [
                    {"text": "I am ready."},
                    {"usage": {"input_tokens": 50_000, "output_tokens": 9, "total_tokens": 50_009}},
                ]
            ],
        },
        {
            "user": {"regex": "^Choose"},
            "answers": [
                [{"text": ["hum " * 20_000]}, {"tool_call": {"name": "exec_command", "arguments": {"cmd": "true"}}}]
            ],
        },
    ],
    "default": "They agreed on seven.",
}


def test_long_session_continues_after_server_compaction(codex: Any, transport: str) -> None:
    agent = codex(LONG, "--server-compaction")
    limit = {"model_auto_compact_token_limit": 20_000}
    first = agent.run("Choose a number.", transport=transport, settings=limit)
    second = agent.run("resume", first.thread, "What was it?", transport=transport, settings=limit)
    assert (first.messages[-1], second.messages) == ("I am ready.", ["It was seven."])
    # Only the summary request contains the long text.
    assert ["hum hum" in json.dumps(items) for items in agent.model.input_items()] == [False, True, False, False]
    assert agent.model.input_items()[2][-1]["type"] == "function_call_output"


def test_long_session_continues_after_codex_compaction(codex: Any, transport: str) -> None:
    agent = codex(LONG)
    limit = {"model_auto_compact_token_limit": 20_000}
    first = agent.run("Choose a number.", transport=transport, settings=limit)
    second = agent.run("resume", first.thread, "What was it?", transport=transport, settings=limit)
    assert second.messages == ["It was seven."]
    assert "hum hum" not in json.dumps(agent.model.input_items()[-1])
