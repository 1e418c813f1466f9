"""Shell, patch and computer tools that functions of the program run."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import (
    Block,
    CallCheck,
    CommandOutput,
    ComputerRequest,
    ConfigError,
    Limits,
    LocalShellRequest,
    PatchRequest,
    ShellRequest,
    SqliteLedger,
    ToolContext,
    apply_patch_tool,
    computer_tool,
    local_shell_tool,
    shell_tool,
    tool,
)
from antiphon.agent.loop_guard import WARNING
from antiphon.agent.tool_calls import CANCELLED
from antiphon.tools.native import MAX_OUTPUT_LENGTH
from support.scripted_model import UpstreamModel, open_scripted

SHELL = {"type": "shell_call", "id": "sh_1", "call_id": "call_s", "status": "completed"}
LIST = SHELL | {"action": {"commands": ["ls", "pwd"], "timeout_ms": 500, "max_output_length": 4}}
LOCAL = {
    "type": "local_shell_call",
    "id": "ls_1",
    "call_id": "call_l",
    "status": "completed",
    "action": {"type": "exec", "command": ["ls"], "env": {"A": "1"}, "working_directory": "/tmp"},
}
PATCH = {
    "type": "apply_patch_call",
    "id": "ap_1",
    "call_id": "call_p",
    "status": "completed",
    "operation": {"type": "update_file", "path": "a.txt", "diff": "@@\n-a\n+b"},
}
CLICK = {
    "type": "computer_call",
    "id": "cu_1",
    "call_id": "call_c",
    "status": "completed",
    "pending_safety_checks": [],
    "action": {"type": "click", "x": 1, "y": 2, "button": "left"},
}


@pytest.fixture
async def model() -> AsyncIterator[UpstreamModel]:
    async with open_scripted("upstream") as opened:
        assert isinstance(opened, UpstreamModel)
        yield opened


def item(value: dict[str, Any]) -> dict[str, Any]:
    return {"item": value}


def last_items(model: UpstreamModel, count: int = 1) -> Any:
    return model.sent[-1]["input"][-count:]


class Shell:
    """Runs commands of a shell, without one."""

    def __init__(self, outputs: list[CommandOutput] | None = None) -> None:
        self.requests: list[ShellRequest] = []
        self.keys: list[str] = []
        self.threads: list[threading.Thread] = []
        self._outputs = outputs

    def __call__(self, request: ShellRequest, context: ToolContext) -> list[CommandOutput]:
        self.requests.append(request)
        self.keys.append(context.idempotency_key)
        self.threads.append(threading.current_thread())
        if self._outputs is None:
            raise OSError("no shell")
        return self._outputs


async def test_commands_run_and_their_outputs_are_sent(model: UpstreamModel) -> None:
    model.set_answers([item(LIST)], "Done.")
    shell = Shell([CommandOutput("abcdef", "", 0), CommandOutput("", "slow", None)])
    outcome = await model.agent(tools=[shell_tool(shell)]).run("Go.", run_id="run_1")
    assert (outcome.kind, outcome.tool_calls) == ("final", 1)
    assert (shell.requests, shell.keys) == ([ShellRequest(["ls", "pwd"], 500, 4)], ["run_1:1:0"])
    # A function that is not a coroutine does not block the event loop.
    assert shell.threads[0] is not threading.main_thread()
    assert model.sent[0]["tools"] == [{"type": "shell", "environment": {"type": "local"}}]
    assert last_items(model, 2) == [
        LIST,
        {
            "type": "shell_call_output",
            "call_id": "call_s",
            "max_output_length": 4,
            "output": [
                {"stdout": "abcd", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
            ],
        },
    ]


async def test_output_without_a_limit_of_the_model_is_limited_too(model: UpstreamModel) -> None:
    model.set_answers([item(SHELL | {"action": {"commands": ["yes"]}})], "Done.")
    await model.agent(tools=[shell_tool(Shell([CommandOutput("y" * 300_000)]))]).run("Go.")
    assert len(last_items(model)[0]["output"][0]["stdout"]) == MAX_OUTPUT_LENGTH


async def test_error_of_a_shell_is_an_output(model: UpstreamModel) -> None:
    model.set_answers([item(LIST)], [item(SHELL | {"action": {"commands": "ls"}, "call_id": "call_2"})], "Done.")
    await model.agent(tools=[shell_tool(Shell())]).run("Go.")
    failed = [each["output"] for each in model.sent[-1]["input"] if each.get("type") == "shell_call_output"]
    assert failed[0] == [{"stdout": "", "stderr": "OSError: no shell", "outcome": {"type": "exit", "exit_code": 1}}]
    assert "The arguments do not fit the schema: Expected `array`" in failed[1][0]["stderr"]


async def test_repeated_failure_stays_marked_as_failed(model: UpstreamModel) -> None:
    def apply(patch: PatchRequest, _: ToolContext) -> None:
        raise ValueError("no match")

    again = [item(LIST | {"call_id": "call_2"}), item(PATCH | {"call_id": "call_3"})]
    model.set_answers([item(LIST), item(PATCH)], again, "Done.")
    await model.agent(tools=[shell_tool(Shell()), apply_patch_tool(apply)]).run("Go.")
    shell, patch = last_items(model, 2)
    failed = {"stdout": "", "stderr": f"OSError: no shell\n\n{WARNING}", "outcome": {"type": "exit", "exit_code": 1}}
    assert shell["output"] == [failed]
    assert (patch["status"], patch["output"]) == ("failed", f'{{"error":"ValueError: no match"}}\n\n{WARNING}')


async def test_output_of_a_command_must_be_text(model: UpstreamModel) -> None:
    model.set_answers([item(LIST)], "Done.")
    await model.agent(tools=[shell_tool(Shell([CommandOutput(b"a")]))]).run("Go.")  # type: ignore[arg-type]
    (output,) = last_items(model)
    assert output["output"][0]["stderr"] == "TypeError: the stdout and stderr of a command must be text, not bytes"


async def test_program_of_the_local_shell_runs(model: UpstreamModel) -> None:
    async def run(request: LocalShellRequest, _: ToolContext) -> str:
        assert request == LocalShellRequest(["ls"], {"A": "1"}, "/tmp")
        return "a.txt"

    model.set_answers([item(LOCAL)], "Done.")
    assert (await model.agent(tools=[local_shell_tool(run)]).run("Go.")).kind == "final"
    assert last_items(model) == [{"type": "local_shell_call_output", "id": "call_l", "output": "a.txt"}]


async def test_patch_is_applied_or_has_failed(model: UpstreamModel) -> None:
    patches: list[PatchRequest] = []

    def apply(patch: PatchRequest, _: ToolContext) -> str | None:
        patches.append(patch)
        if len(patches) > 1:
            raise ValueError("the context does not match")
        return None

    model.set_answers([item(PATCH)], [item(PATCH | {"call_id": "call_q"})], "Done.")
    await model.agent(tools=[apply_patch_tool(apply)]).run("Go.")
    assert patches[0] == PatchRequest("update_file", "a.txt", "@@\n-a\n+b")
    first, second = (each for each in model.sent[-1]["input"] if each.get("type") == "apply_patch_call_output")
    assert first == {"type": "apply_patch_call_output", "call_id": "call_p", "status": "completed", "output": ""}
    assert (second["status"], json.loads(second["output"])) == (
        "failed",
        {"error": "ValueError: the context does not match"},
    )


async def test_actions_on_a_computer_return_a_screenshot(model: UpstreamModel) -> None:
    requests: list[ComputerRequest] = []

    async def act(request: ComputerRequest, _: ToolContext) -> bytes:
        requests.append(request)
        if len(requests) == 2:
            raise RuntimeError("the window is closed")
        return b"png"

    model.set_answers([item(CLICK)], [item(CLICK | {"call_id": "call_d"})], "Done.")
    screen = computer_tool(act, display=(800, 600), environment="linux")
    assert (await model.agent(tools=[screen]).run("Go.")).kind == "final"
    assert requests[0] == ComputerRequest([CLICK["action"]])
    assert model.sent[0]["tools"] == [
        {"type": "computer_use_preview", "display_width": 800, "display_height": 600, "environment": "linux"}
    ]
    (shown,) = last_items(SentBefore(model, 1))
    assert shown["output"] == {"type": "computer_screenshot", "image_url": "data:image/png;base64,cG5n"}
    # An output of this type cannot state an error, so a message does.
    output, message = last_items(model, 2)
    assert (output["type"], output["call_id"]) == ("computer_call_output", "call_d")
    assert "the window is closed" in message["content"]


async def test_screenshot_must_be_data_or_a_url(model: UpstreamModel) -> None:
    model.set_answers([item(CLICK)], "Done.")
    screen = computer_tool(lambda request, _: None)  # type: ignore[arg-type, return-value]
    assert (await model.agent(tools=[screen]).run("Go.")).kind == "final"
    assert "TypeError: a screenshot is NoneType, not PNG data or a URL" in last_items(model)[0]["content"]


class SentBefore:
    """The requests of a model up to one of them."""

    def __init__(self, model: UpstreamModel, index: int) -> None:
        self.sent = model.sent[: index + 1]


async def test_safety_checks_wait_for_a_person(model: UpstreamModel) -> None:
    check = {"id": "sc_1", "code": "malicious_instructions", "message": "Careful."}
    model.set_answers([item(CLICK | {"pending_safety_checks": [check]})], "Done.")
    agent = model.agent(tools=[computer_tool(lambda request, _: f"https://example.com/{len(request.actions)}.png")])
    paused = await agent.run("Go.")
    assert (paused.kind, [each.name for each in paused.pending]) == ("needs_approval", ["computer"])
    assert paused.state is not None
    outcome = await agent.resume(paused.state, approvals={"call_c": True})
    assert outcome.kind == "final"
    (output,) = last_items(model)
    assert output["acknowledged_safety_checks"] == [check]
    assert output["output"]["image_url"] == "https://example.com/1.png"


async def test_approval_and_guardrails_apply(model: UpstreamModel) -> None:
    shell = Shell([CommandOutput("done")])
    model.set_answers([item(LIST)], "Done.")
    careful = model.agent(tools=[shell_tool(shell, needs_approval=lambda given: "pwd" in given["commands"])])
    paused = await careful.run("Go.")
    assert ([each.arguments for each in paused.pending], shell.requests) == (
        [json.dumps(LIST["action"], separators=(",", ":"))],
        [],
    )
    assert paused.state is not None
    denied = await careful.resume(paused.state, approvals={"call_s": "Not on this machine."})
    assert denied.kind == "final"
    assert last_items(model)[0]["output"][0]["stderr"] == "Not on this machine."

    def refuse(check: CallCheck) -> Block | None:
        return Block("no shell") if check.call.name == "shell" else None

    model.set_answers([item(LIST)], "Done.")
    outcome = await model.agent(tools=[shell_tool(shell)], call_guardrails=[refuse]).run("Go.")
    assert (outcome.kind, shell.requests) == ("blocked", [])


async def test_limits_and_repeated_commands_are_counted(model: UpstreamModel) -> None:
    model.set_answers([item(LIST)], [item(LIST)], [item(LIST)], "Done.")
    shell = Shell([CommandOutput("same")])
    outcome = await model.agent(tools=[shell_tool(shell)]).run("Go.")
    assert (outcome.kind, len(shell.requests)) == ("no_progress", 2)
    warned = [each["output"] for each in outcome.history if each.get("type") == "shell_call_output"][1]
    assert (len(warned), "made before" in warned[1]["stderr"]) == (2, True)
    limited = Shell([CommandOutput("same")])
    model.set_answers([item(LIST)], "Done.")
    outcome = await model.agent(tools=[shell_tool(limited)], limits=Limits(tool_calls=0)).run("Go.")
    assert (outcome.kind, limited.requests) == ("budget", [])


async def test_interrupted_command_waits_for_a_person(model: UpstreamModel, tmp_path: Path) -> None:
    running = asyncio.Event()
    keys: list[str] = []

    async def run(_: ShellRequest, context: ToolContext) -> list[CommandOutput]:
        keys.append(context.idempotency_key)
        running.set()
        if len(keys) == 1:
            await asyncio.Event().wait()
        return [CommandOutput("done")]

    ledger = SqliteLedger(tmp_path / "runs.db")
    agent = model.agent(tools=[shell_tool(run)])
    model.set_answers([item(LIST)], "Done.")
    task = asyncio.create_task(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await running.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    paused = await agent.resume("run_1", ledger=ledger)
    assert [(each.name, each.reason) for each in paused.pending] == [("shell", "may_have_happened")]
    outcome = await agent.resume("run_1", approvals={"call_s": True}, ledger=ledger)
    assert (outcome.kind, keys) == ("final", ["run_1:1:0"] * 2)
    await ledger.close()


async def test_cancelled_run_has_an_output_for_each_open_call(model: UpstreamModel) -> None:
    cancel = asyncio.Event()

    async def run(_: ShellRequest, __: ToolContext) -> list[CommandOutput]:
        cancel.set()
        await asyncio.Event().wait()
        raise AssertionError

    model.set_answers([item(LIST)])
    outcome = await model.agent(tools=[shell_tool(run)]).run("Go.", cancel=cancel)
    assert outcome.kind == "cancelled"
    assert outcome.history[-1]["output"][0]["stderr"] == CANCELLED


async def test_call_that_the_server_has_run_is_not_run_again(model: UpstreamModel) -> None:
    shell = Shell([CommandOutput("done")])
    made = {"type": "shell_call_output", "id": "so_1", "call_id": "call_s", "output": [], "status": "completed"}
    model.set_answers([item(LIST), item(made), {"text": "Done."}])
    outcome = await model.agent(tools=[shell_tool(shell)]).run("Go.")
    assert (outcome.kind, outcome.text, shell.requests) == ("final", "Done.", [])


async def test_native_and_function_calls_of_one_turn_run_together(model: UpstreamModel) -> None:
    look = tool(name="look", description="Look.")(lambda: "mild")
    made = {"tool_call": {"name": "look", "arguments": {}, "call_id": "call_f", "key": "call_f"}}
    model.set_answers([item(LOCAL), made, item(PATCH)], "Done.")
    run = local_shell_tool(lambda *_: "a.txt")
    await model.agent(tools=[look, run, apply_patch_tool(lambda *_: "ok")]).run("Go.")
    assert [each["output"] for each in last_items(model, 3)] == ["a.txt", "mild", "ok"]


async def test_call_without_a_tool_is_left_to_the_program(model: UpstreamModel) -> None:
    model.set_answers([item(LIST)])
    outcome = await model.agent(tools=[apply_patch_tool(lambda *_: None)]).run("Go.")
    assert (outcome.kind, outcome.history[-1]) == ("no_progress", LIST)


def test_function_with_the_name_of_a_native_tool_is_refused(model: UpstreamModel) -> None:
    mine = tool(name="shell", description="Mine.")(lambda: 1)
    with pytest.raises(ConfigError, match="There are two tools called 'shell'"):
        model.agent(tools=[mine, shell_tool(Shell())])
