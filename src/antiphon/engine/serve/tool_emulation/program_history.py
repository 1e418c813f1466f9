"""Programs in a history: the model reads the program and its output, and not the calls between them."""

from collections.abc import Iterator, Sequence
from typing import Any

from antiphon.protocol.hosted import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    Program,
    ProgramOutput,
    ShellCall,
    ShellCallOutput,
)
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown

Items = list[Item | Unknown]

CLIENT_CALL_TYPES = (FunctionCall, CustomToolCall, ShellCall, ApplyPatchCall)
CLIENT_OUTPUT_TYPES = (FunctionCallOutput, CustomToolCallOutput, ShellCallOutput, ApplyPatchCallOutput)
_NOT_CONTINUED = "The program was not continued, so it has no result."


def is_called_by_program(item: Any, call_id: str | None = None) -> bool:
    """Return True if a program made the call, or the program with this call id."""
    caller = getattr(item, "caller", None)
    if not isinstance(caller, dict) or caller.get("type") != "program":
        return False
    return call_id is None or caller.get("caller_id") == call_id


def remove_nested_calls(items: Sequence[Item | Unknown], resumed: str | None = None) -> Items:
    """Return the items with each program directly before its output, and without the calls of programs.

    A program without output gets one, except the one with the call id `resumed`: it is removed, because this response
    continues it.
    """
    if Program not in map(type, items):  # the common case
        return list(items)
    return list(_ProgramReader(items, resumed).read())


class _ProgramReader:
    def __init__(self, items: Sequence[Item | Unknown], resumed: str | None) -> None:
        self._items = items
        self._resumed = resumed
        self._finished = {item.call_id for item in items if isinstance(item, ProgramOutput)}
        self._open: dict[str, Program] = {}
        self._call_ids: set[str] = set()
        self._approvals: set[str] = set()

    def read(self) -> Iterator[Item | Unknown]:
        for item in self._items:
            if isinstance(item, Program):
                self._open[item.call_id] = item
                if item.call_id not in self._finished and item.call_id != self._resumed:
                    yield item
                    yield ProgramOutput(item.call_id, _NOT_CONTINUED, "", "incomplete")
            elif isinstance(item, ProgramOutput):
                program = self._open.pop(item.call_id, None)
                if program is not None:
                    yield program
                    yield item
            elif not self._is_nested(item):
                self._end_unfinished(item)
                yield item

    def _is_nested(self, item: Item | Unknown) -> bool:
        if isinstance(item, CLIENT_CALL_TYPES) and (is_called_by_program(item) or self._is_hosted_shell(item)):
            self._call_ids.add(item.call_id)
            return True
        if isinstance(item, CLIENT_OUTPUT_TYPES):
            return item.call_id in self._call_ids
        if isinstance(item, McpApprovalResponse):
            return item.approval_request_id in self._approvals
        if isinstance(item, McpCall) and item.approval_request_id is not None:
            return item.approval_request_id in self._approvals
        if not self._open:
            return False
        if isinstance(item, McpApprovalRequest):
            self._approvals.add(item.id)
            return True
        return isinstance(item, McpCall | CodeInterpreterCall)

    def _is_hosted_shell(self, item: Item) -> bool:
        return bool(self._open) and isinstance(item, ShellCall) and is_hosted_shell_call(item)

    def _end_unfinished(self, item: Item | Unknown) -> None:
        """End programs that are not continued where the next turn begins. Calls after that are the model's."""
        if self._open and isinstance(item, Message | Reasoning):
            self._open = {
                call_id: program
                for call_id, program in self._open.items()
                if call_id in self._finished or call_id == self._resumed
            }


def is_hosted_shell_call(item: ShellCall) -> bool:
    """Return True if the server ran the commands, in a container."""
    return str((item.environment or {}).get("type", "")).startswith("container")
