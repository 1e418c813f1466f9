"""The calls that a program has made in earlier responses, so that it can be run again without repeating them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.engine.serve.hosted.program_tools import NestedTool, read_text
from antiphon.engine.serve.tool_emulation.program_history import (
    CLIENT_CALL_TYPES,
    CLIENT_OUTPUT_TYPES,
    is_called_by_program,
    is_hosted_shell_call,
)
from antiphon.protocol.hosted import (
    ApplyPatchCall,
    CodeInterpreterCall,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    Program,
    ProgramOutput,
    ShellAction,
    ShellCall,
)
from antiphon.protocol.items import CustomToolCall, FunctionCall, Item, Message, Reasoning
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.code_interpreter.code_stream import parse_code

_VERSION = "v1"
_MAX_CLOCK_DIGITS = 15
_MAX_COUNT_DIGITS = 8


class ReplayError(Exception):
    """A program cannot be continued: its second run differs from the first, or its items are not complete."""


class CallPair(msgspec.Struct):
    """A call of a program and the item with its result, if there is one. `decision` is that on an approval.

    `is_recorded`: an earlier response has made the call.
    """

    call: Item
    output: Item | None = None
    decision: McpApprovalResponse | None = None
    is_recorded: bool = True


class ProgramRecord(msgspec.Struct):
    """A program without output, and its calls so far, each list in order."""

    program: Program
    hosted: list[CallPair] = []
    client: list[CallPair] = []

    def check(self) -> int:
        """Return the time of the program's clock. Raises ReplayError if the items are not those of this program."""
        clock_ms = read_fingerprint(self.program)
        if clock_ms is None:
            raise ReplayError("its code or fingerprint was changed, or it is a program of another server")
        counted = max((count_hosted_calls(pair.call) for pair in self.client), default=0)
        if counted > len(self.hosted):
            raise ReplayError("calls that it has made are missing in the input")
        return clock_ms


def find_unfinished_program(items: Sequence[Item | Unknown]) -> ProgramRecord | None:
    """Return the last program of the items that has no output, with its calls.

    If the model has answered since, a request without the tool has given the program up.
    """
    finished = {item.call_id for item in items if isinstance(item, ProgramOutput)}
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, Reasoning) or (isinstance(item, Message) and item.role == "assistant"):
            return None
        if isinstance(item, Program) and item.call_id not in finished:
            record = ProgramRecord(item)
            add_calls(record, items[index + 1 :])
            return record
    return None


def add_calls(record: ProgramRecord, items: Sequence[Item | Unknown]) -> None:
    """Add the calls among the items after the program. All hosted calls there are its own, unless approved before."""
    pairs = [*record.client, *record.hosted]
    by_id = {getattr(pair.call, "call_id", None) or pair.call.id: pair for pair in pairs}
    for item in items:
        answered = by_id.get(_get_answered_id(item))
        if answered is not None:
            if isinstance(item, McpApprovalResponse):
                answered.decision = item
            elif not isinstance(item, Unknown):
                answered.output = item
        elif isinstance(item, McpCall) and item.approval_request_id is not None:
            continue  # a call of the model
        elif isinstance(item, McpApprovalRequest | McpCall | CodeInterpreterCall):
            pair = CallPair(item, None if isinstance(item, McpApprovalRequest) else item)
            record.hosted.append(pair)
            by_id[item.id] = pair
        elif isinstance(item, CLIENT_CALL_TYPES):
            is_hosted = isinstance(item, ShellCall) and is_hosted_shell_call(item)
            if is_hosted or is_called_by_program(item, record.program.call_id):
                pair = CallPair(item)
                (record.hosted if is_hosted else record.client).append(pair)
                by_id[item.call_id] = pair


def _get_answered_id(item: Item | Unknown) -> str | None:
    """Return the id of the call that an item answers."""
    if isinstance(item, McpApprovalResponse | McpCall):
        return item.approval_request_id
    return item.call_id if isinstance(item, CLIENT_OUTPUT_TYPES) else None


# Fingerprints and ids


def make_fingerprint(code: str, call_id: str, clock_ms: int) -> str:
    """Return the fingerprint of a program: the time of its clock, and a digest of everything that decides its run."""
    return f"{_VERSION}.{clock_ms}.{_digest(code, call_id, clock_ms)}"


def read_fingerprint(program: Program) -> int | None:
    """Return the time of the program's clock; None if the fingerprint is not that of the program."""
    _, _, rest = program.fingerprint.partition(".")
    clock, _, _ = rest.partition(".")
    if not clock.isdecimal() or len(clock) > _MAX_CLOCK_DIGITS:
        return None
    expected = make_fingerprint(program.code, program.call_id, int(clock))
    return int(clock) if program.fingerprint == expected else None


def make_seed(program: Program) -> int:
    """Return the seed of the program's random numbers."""
    return int(hashlib.sha256(program.fingerprint.encode()).hexdigest()[:8], 16)


def _digest(code: str, call_id: str, clock_ms: int) -> str:
    text = f"{_VERSION}\0{clock_ms}\0{call_id}\0{code}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def make_program_id(response_id: str, key: str) -> str:
    """Return the call id of a program. All attempts at a response have the same one."""
    return f"call_{hashlib.sha256(f'{response_id}/{key}'.encode()).hexdigest()[:32]}"


def make_nested_id(program_id: str, number: int, hosted_calls: int) -> str:
    """Return the id of a client's call: it has the number of hosted calls that the program has made before."""
    return f"{program_id}_{hosted_calls}_{number}"


def count_hosted_calls(call: Any) -> int:
    """Return the number of hosted calls that an id of `make_nested_id` has."""
    match str(getattr(call, "call_id", "")).rsplit("_", 2):
        case [_, count, _] if count.isdecimal() and len(count) <= _MAX_COUNT_DIGITS:
            return int(count)
    return 0


# Comparison of a call with its record


def is_same_call(call: Item, tool: NestedTool, arguments: str) -> bool:
    """Return True if the recorded call is this call."""
    match call:
        case FunctionCall():
            return (call.name, call.namespace) == (tool.own_name, tool.namespace) and _is_same_json(
                call.arguments, arguments
            )
        case CustomToolCall():
            return (call.name, call.namespace) == (tool.own_name, tool.namespace) and call.input == read_text(arguments)
        case ShellCall():
            return tool.shown.name == "shell" and _read_action(arguments) == call.action
        case ApplyPatchCall():
            return tool.own_name == "apply_patch" and read_json(arguments) == call.operation
        case McpCall() | McpApprovalRequest():
            label = getattr(tool.opened.entry, "server_label", None) if tool.opened is not None else None
            return (call.server_label, call.name) == (label, tool.own_name) and _is_same_json(call.arguments, arguments)
        case CodeInterpreterCall():
            return tool.own_name == "code_interpreter" and (call.code or "") == (parse_code(arguments) or "")
    return False


def _read_action(arguments: str) -> ShellAction | None:
    try:
        action: ShellAction = read_json(arguments, ShellAction)
    except msgspec.DecodeError:
        return None
    return action


def _is_same_json(first: str, second: str) -> bool:
    try:
        return bool(read_json(first) == read_json(second))
    except msgspec.DecodeError:
        return False
