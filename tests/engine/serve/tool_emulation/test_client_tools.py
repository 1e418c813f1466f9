"""Shell, patch and computer tools on a model that only supports functions."""

import json
from typing import Any

import pytest

from support.tool_emulation import call

LOCAL = {"type": "local_shell"}
SHELL = {"type": "shell"}
PATCH = {"type": "apply_patch"}
COMPUTER = {"type": "computer"}
PREVIEW = {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "browser"}
CLICK = {"type": "click", "x": 1, "y": 2, "button": "left"}
SHOT = "data:image/png;base64,AA=="

# A tool, the function the model calls, with what, and the item the client gets.
CALLS: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "local_shell": (
        LOCAL,
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 9},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9},
        },
    ),
    "shell": (
        SHELL,
        "shell",
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"]}, "environment": {"type": "local"}},
    ),
    "apply_patch": (
        PATCH,
        "apply_patch",
        {"type": "update_file", "path": "a.txt", "diff": "-a\n+b"},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.txt", "diff": "-a\n+b"}},
    ),
    "computer": (
        COMPUTER,
        "computer",
        {"actions": [CLICK, {"type": "type", "text": "hi"}]},
        {"type": "computer_call", "pending_safety_checks": [], "actions": [CLICK, {"type": "type", "text": "hi"}]},
    ),
    "computer_use_preview": (
        PREVIEW,
        "computer",
        {"action": CLICK},
        {"type": "computer_call", "pending_safety_checks": [], "action": CLICK},
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_emulated_call_becomes_its_own_item_type(emulate: Any, name: str) -> None:
    tool, function, arguments, item = CALLS[name]
    harness = await emulate({"text": "I do."}, call(function, arguments), {"text": "Done?"})
    answer = await harness.ask(tools=[tool])
    assert answer.output[1] == item | {"call_id": "call_1", "status": "completed"}
    assert [each["type"] for each in answer.output] == ["message", item["type"], "message"]
    assert answer.shown == [function]


@pytest.mark.parametrize("name", CALLS)
async def test_invalid_arguments_are_retried_once(emulate: Any, name: str) -> None:
    tool, function, arguments, item = CALLS[name]
    rules = [{"text": "arguments are wrong", "answers": [[call(function, arguments)]]}]
    harness = await emulate(call(function, {"nonsense": 1}, "call_0"), rules=rules)
    answer = await harness.ask(tools=[tool])
    assert answer.output == [item | {"call_id": "call_1", "status": "completed"}]


@pytest.mark.parametrize("name", CALLS)
async def test_invalid_arguments_after_the_retry_fail_the_response(emulate: Any, name: str) -> None:
    tool, function, *_ = CALLS[name]
    harness = await emulate(call(function, "{"))
    answer = await harness.ask(tools=[tool])
    assert (answer.response["status"], answer.response["error"]["code"]) == ("failed", "invalid_tool_input")


@pytest.mark.parametrize("name", CALLS)
async def test_call_without_an_id_gets_one(emulate: Any, name: str) -> None:
    tool, function, arguments, _ = CALLS[name]
    harness = await emulate({"tool_call": {"name": function, "arguments": arguments}})
    (item,) = (await harness.ask(tools=[tool])).response["output"]
    assert item["call_id"].partition("_")[2] == item["id"].partition("_")[2] != ""


async def test_shell_commands_are_emitted_one_by_one(emulate: Any) -> None:
    harness = await emulate(call("shell", {"commands": ["ls", "pwd"]}))
    answer = await harness.ask(tools=[SHELL])
    assert [
        (event["type"].removeprefix("response."), event.get("command_index"), event.get("command", event.get("delta")))
        for event in answer.events[2:-1]
    ] == [
        ("output_item.added", None, None),
        ("shell_call_command.added", 0, ""),
        ("shell_call_command.delta", 0, "ls"),
        ("shell_call_command.done", 0, "ls"),
        ("shell_call_command.added", 1, ""),
        ("shell_call_command.delta", 1, "pwd"),
        ("shell_call_command.done", 1, "pwd"),
        ("output_item.done", None, None),
    ]


OUTPUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "local_shell": ({"type": "local_shell_call_output", "id": "call_1", "output": "a.txt"}, "a.txt"),
    "shell": (
        {
            "type": "shell_call_output",
            "call_id": "call_1",
            "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        '[{"stdout":"a","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "apply_patch": (
        {"type": "apply_patch_call_output", "call_id": "call_1", "status": "failed", "output": "no such file"},
        "failed: no such file",
    ),
    "computer": (
        {
            "type": "computer_call_output",
            "call_id": "call_1",
            "output": {"type": "computer_screenshot", "image_url": SHOT},
        },
        [{"type": "input_image", "image_url": SHOT}],
    ),
    "computer_use_preview": (
        {
            "type": "computer_call_output",
            "call_id": "call_1",
            "output": {"type": "computer_screenshot", "file_id": "file_1"},
        },
        [{"type": "input_image", "file_id": "file_1"}],
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_history_call_and_output_become_function_items(emulate: Any, name: str) -> None:
    tool, function, arguments, item = CALLS[name]
    output, read = OUTPUTS[name]
    harness = await emulate({"text": "Ok."})
    sent = [{"role": "user", "content": "?"}, item | {"id": "x", "call_id": "call_1", "status": "completed"}, output]
    answer = await harness.ask(sent, tools=[tool])
    called, came = answer.read[1:]
    assert (called["type"], called["name"], called["call_id"]) == ("function_call", function, "call_1")
    assert {"env": {}} | json.loads(called["arguments"]) == {"env": {}} | arguments
    assert (came["type"], came["call_id"], came["output"]) == ("function_call_output", "call_1", read)


async def test_screenshot_becomes_a_note_for_a_model_without_images(emulate: Any) -> None:
    harness = await emulate({"text": "Ok."}, lacks=["images"])
    item = CALLS["computer"][3] | {"id": "x", "call_id": "call_1", "status": "completed"}
    answer = await harness.ask([{"role": "user", "content": "?"}, item, OUTPUTS["computer"][0]], tools=[COMPUTER])
    assert answer.read[2]["output"] == [
        {"type": "input_text", "text": "A screenshot was taken, but images cannot be shown here."}
    ]
