"""Tools that a model knows by their type: shell, local shell, apply patch and computer. Functions run their calls.

Their calls are items of their own types, with actions instead of arguments, and so are their outputs. Here they become
calls with a name and JSON arguments, so that approval, limits, guardrails and the ledger apply to them as to others.
"""

import base64
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import OnInterrupt, Tool, ToolContext, ToolResult
from antiphon.tools.executor import find_error
from antiphon.tools.function import call_function

CALL_NAMES = {
    "shell_call": "shell",
    "local_shell_call": "local_shell",
    "apply_patch_call": "apply_patch",
    "computer_call": "computer",
}
"""The names of the tools, by the types of their calls."""

CALL_TYPES = {
    "shell": "shell_call",
    "local_shell": "local_shell_call",
    "apply_patch": "apply_patch_call",
    "computer": "computer_call",
    "computer_use_preview": "computer_call",
}
"""The types of the calls, by the types of the tools in a request."""

MAX_OUTPUT_LENGTH = 100_000
"""The number of characters of each output of a command, if the model does not state it."""

# A transparent picture of one pixel: the output of a computer call must have a picture, even after an error.
_NO_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


class NativeTool(Tool, frozen=True, kw_only=True):
    """A tool that the model knows by its type. `entry` is its entry in the request's `tools`."""

    entry: JsonObject

    def describe(self) -> JsonObject:
        return self.entry


class ShellRequest(Struct, frozen=True):
    """Commands that the model wants to run in a shell. The limits are wishes of the model."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class CommandOutput(Struct, frozen=True):
    """The output of a command. `exit_code` is None if the command has reached its time limit."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = 0


class LocalShellRequest(Struct, frozen=True):
    """A program that the model wants to run, as `local_shell` of older models."""

    command: list[str]
    env: dict[str, str] = {}
    working_directory: str | None = None
    timeout_ms: int | None = None
    user: str | None = None


class PatchRequest(Struct, frozen=True):
    """A change of a file. `diff` is a patch in the V4A format, or None if the file is deleted."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ComputerRequest(Struct, frozen=True):
    """Actions on a computer, such as `{"type": "click", "x": 1, "y": 2}`. A person has accepted the safety checks."""

    actions: list[JsonObject]
    safety_checks: list[JsonObject] = []


RunShell: TypeAlias = Callable[
    [ShellRequest, ToolContext[Any]], Sequence[CommandOutput] | Awaitable[Sequence[CommandOutput]]
]
RunLocalShell: TypeAlias = Callable[[LocalShellRequest, ToolContext[Any]], str | Awaitable[str]]
ApplyPatch: TypeAlias = Callable[[PatchRequest, ToolContext[Any]], str | Awaitable[str | None] | None]
UseComputer: TypeAlias = Callable[[ComputerRequest, ToolContext[Any]], bytes | str | Awaitable[bytes | str]]
NeedsApproval: TypeAlias = bool | Callable[[Mapping[str, Any]], bool]


def shell_tool(
    run: RunShell,
    *,
    needs_approval: NeedsApproval = False,
    timeout: float | None = None,
    on_interrupt: OnInterrupt = "ask",
    concurrency: int | None = None,
) -> Tool:
    """Return the tool `shell`. `run` runs the commands and returns the output of each."""

    async def invoke(text: str, context: ToolContext[Any]) -> ToolResult:
        request = read_json(text or "{}", ShellRequest)
        outputs = await _call(run, request, context)
        limit = min(request.max_output_length or MAX_OUTPUT_LENGTH, MAX_OUTPUT_LENGTH)
        return ToolResult([_encode_command(each, limit) for each in outputs])

    return NativeTool(
        name="shell",
        description="Run commands in a shell.",
        parameters={},
        invoke=invoke,
        entry={"type": "shell", "environment": {"type": "local"}},
        needs_approval=needs_approval,
        timeout=timeout,
        on_interrupt=on_interrupt,
        concurrency=concurrency,
    )


def local_shell_tool(
    run: RunLocalShell,
    *,
    needs_approval: NeedsApproval = False,
    timeout: float | None = None,
    on_interrupt: OnInterrupt = "ask",
    concurrency: int | None = None,
) -> Tool:
    """Return the tool `local_shell`. `run` runs the program and returns its output."""

    async def invoke(text: str, context: ToolContext[Any]) -> ToolResult:
        return ToolResult(str(await _call(run, read_json(text or "{}", LocalShellRequest), context)))

    return NativeTool(
        name="local_shell",
        description="Run a program.",
        parameters={},
        invoke=invoke,
        entry={"type": "local_shell"},
        needs_approval=needs_approval,
        timeout=timeout,
        on_interrupt=on_interrupt,
        concurrency=concurrency,
    )


def apply_patch_tool(
    apply: ApplyPatch,
    *,
    needs_approval: NeedsApproval = False,
    timeout: float | None = None,
    on_interrupt: OnInterrupt = "ask",
) -> Tool:
    """Return the tool `apply_patch`. `apply` changes one file and may return a text. It raises if that fails."""

    async def invoke(text: str, context: ToolContext[Any]) -> ToolResult:
        return ToolResult(str(await _call(apply, read_json(text or "{}", PatchRequest), context) or ""))

    return NativeTool(
        name="apply_patch",
        description="Change a file.",
        parameters={},
        invoke=invoke,
        entry={"type": "apply_patch"},
        needs_approval=needs_approval,
        timeout=timeout,
        on_interrupt=on_interrupt,
        # Two changes of one file must not run at the same time.
        concurrency=1,
    )


def computer_tool(
    act: UseComputer,
    *,
    display: tuple[int, int] | None = None,
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"] = "browser",
    needs_approval: NeedsApproval = False,
    timeout: float | None = None,
    on_interrupt: OnInterrupt = "ask",
) -> Tool:
    """Return the tool `computer`. `act` performs the actions and returns a screenshot: PNG data, or a URL.

    A call with safety checks always needs approval. With the width and height of a `display`, the tool has the type
    `computer_use_preview` of older models.
    """

    async def invoke(text: str, context: ToolContext[Any]) -> ToolResult:
        screenshot = await _call(act, read_json(text or "{}", ComputerRequest), context)
        if not isinstance(screenshot, bytes | str):
            raise TypeError(f"a screenshot is {type(screenshot).__name__}, not PNG data or a URL")
        if isinstance(screenshot, bytes):
            screenshot = f"data:image/png;base64,{base64.b64encode(screenshot).decode()}"
        return ToolResult([{"type": "computer_screenshot", "image_url": screenshot}])

    def must_approve(arguments: Mapping[str, Any]) -> bool:
        if arguments.get("safety_checks"):
            return True
        return needs_approval(arguments) if callable(needs_approval) else needs_approval

    entry: JsonObject = {"type": "computer"}
    if display is not None:
        width, height = display
        entry = {
            "type": "computer_use_preview",
            "display_width": width,
            "display_height": height,
            "environment": environment,
        }
    return NativeTool(
        name="computer",
        description="Use a computer.",
        parameters={},
        invoke=invoke,
        entry=entry,
        needs_approval=must_approve,
        timeout=timeout,
        on_interrupt=on_interrupt,
        # A model looks at the same screen again and again.
        repeatable=True,
        concurrency=1,
    )


async def _call(function: Callable[..., Any], request: Struct, context: ToolContext[Any]) -> Any:
    try:
        return await call_function(functools.partial(function, request, context), {}, name=context.call_id)
    except msgspec.MsgspecError as error:
        # Raised by the function itself. The executor would report it as an error in the arguments.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _encode_command(output: CommandOutput, limit: int) -> JsonObject:
    if not isinstance(output, CommandOutput):
        raise TypeError(f"a command has {type(output).__name__}, not CommandOutput")
    if not all(isinstance(each, str) for each in (output.stdout, output.stderr)):
        raise TypeError("the stdout and stderr of a command must be text, not bytes")
    code = output.exit_code
    outcome = {"type": "timeout"} if code is None else {"type": "exit", "exit_code": code}
    return {"stdout": output.stdout[:limit], "stderr": output.stderr[:limit], "outcome": outcome}


# Items


def encode_arguments(item: JsonObject) -> str:
    """Return the action of a call as JSON arguments."""
    match item.get("type"):
        case "apply_patch_call":
            arguments = item.get("operation") or {}
        case "computer_call":
            actions = item.get("actions") or ([item["action"]] if item.get("action") else [])
            arguments = {"actions": actions, "safety_checks": item.get("pending_safety_checks") or []}
        case _:
            arguments = item.get("action") or {}
    return msgspec.json.encode(arguments).decode()


def make_native_output(call: JsonObject, output: str | list[JsonObject]) -> list[JsonObject]:
    """Return the output item of a call of such a tool. A message follows it if the item cannot state an error."""
    call_id = call["call_id"]
    match call["type"]:
        case "shell_call":
            item: JsonObject = {"type": "shell_call_output", "call_id": call_id, "output": _read_commands(output)}
            length = (call.get("action") or {}).get("max_output_length")
            return [item if length is None else item | {"max_output_length": length}]
        case "local_shell_call":
            # Its id is that of the call.
            return [{"type": "local_shell_call_output", "id": call_id, "output": _join(output)}]
        case "apply_patch_call":
            text = _join(output)
            status = "failed" if find_error(text) is not None else "completed"
            return [{"type": "apply_patch_call_output", "call_id": call_id, "status": status, "output": text}]
        case _:
            return _make_computer_items(call, output)


def _make_computer_items(call: JsonObject, output: str | list[JsonObject]) -> list[JsonObject]:
    parts = output if isinstance(output, list) else []
    screenshot = next((part for part in parts if part.get("type") == "computer_screenshot"), None)
    text = _join([part for part in parts if part is not screenshot]) if parts else _join(output)
    item: JsonObject = {
        "type": "computer_call_output",
        "call_id": call["call_id"],
        "output": screenshot or {"type": "computer_screenshot", "image_url": _NO_PICTURE},
    }
    checks = call.get("pending_safety_checks")
    if checks and screenshot is not None:
        item["acknowledged_safety_checks"] = checks
    return [item, {"role": "user", "content": text}] if text else [item]


def _read_commands(output: str | list[JsonObject]) -> list[JsonObject]:
    """Return the outputs of the commands of a shell call. Errors and warnings are texts of one more command."""
    if isinstance(output, list):
        return [each if "outcome" in each else _make_note(str(each.get("text", ""))) for each in output]
    error = find_error(output)
    return (
        [_make_note(error, exit_code=1)] if error is not None else [_encode_command(CommandOutput(output), len(output))]
    )


def _make_note(text: str, *, exit_code: int = 0) -> JsonObject:
    return _encode_command(CommandOutput(stderr=text, exit_code=exit_code), len(text))


def _join(output: str | list[JsonObject]) -> str:
    return output if isinstance(output, str) else "\n".join(str(part.get("text", "")) for part in output)
