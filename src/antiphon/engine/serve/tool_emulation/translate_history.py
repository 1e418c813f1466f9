"""Items of the history that a backend which only knows functions cannot read, put so that it can."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import Catalog, ToolKey
from antiphon.protocol import codec, hosted
from antiphon.protocol.content import InputImage, InputText, OutputText, Part
from antiphon.protocol.items import (
    Compaction,
    CompactionTrigger,
    ConfigurationUpdate,
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
# Every backend reads these, or knows that it may leave them aside.
READABLE = frozenset({Message, FunctionCall, FunctionCallOutput, Reasoning, Compaction, CompactionTrigger})


def is_readable(item: Item | Unknown) -> bool:
    return type(item) in READABLE and (type(item) is not FunctionCall or item.namespace is None)


def are_readable(items: Sequence[Item | Unknown]) -> bool:
    """Whether all of them are."""
    kinds = set(map(type, items))
    return kinds <= READABLE and (FunctionCall not in kinds or all(map(is_readable, items)))


def translate_items(items: Iterable[Item | Unknown], catalog: Catalog, *, custom: bool, images: bool) -> Items:
    """The history for a backend. `custom`: it takes custom tools itself; `images`: it sees them."""
    renderer = _Renderer(catalog, custom=custom, images=images)
    rendered: Items = []
    for item in items:
        rendered += [item] if is_readable(item) else renderer.translate(item)
    return rendered


class _Renderer:
    def __init__(self, catalog: Catalog, *, custom: bool, images: bool) -> None:
        self._catalog = catalog
        self._custom = custom
        self._images = images
        self._searches = 0

    def translate(self, item: Item | Unknown) -> Sequence[Item | Unknown]:
        if isinstance(item, Unknown):
            return [_tell("user", item.raw.decode(errors="replace"))]
        handler = self._HANDLERS.get(type(item))
        return handler(self, item) if handler is not None else [_tell("assistant", _dump(item))]

    def _call(self, kind: str, call_id: str, arguments: Any) -> list[Item | Unknown]:
        text = _dump(arguments)
        return [FunctionCall(call_id, self._catalog.name_of(ToolKey(kind)), text, status="completed")]

    # Calls that a client carries out, and what came of them

    def _function_call(self, item: FunctionCall) -> Sequence[Item | Unknown]:
        name = self._catalog.name_of(ToolKey("named", item.namespace, item.name))
        return [msgspec.structs.replace(item, name=name, namespace=None)]

    def _custom_call(self, item: CustomToolCall) -> Sequence[Item | Unknown]:
        name = self._catalog.name_of(ToolKey("named", item.namespace, item.name))
        if self._custom:
            return [msgspec.structs.replace(item, name=name, namespace=None)]
        return [FunctionCall(item.call_id, name, _dump({"input": item.input}), item.id, item.status)]

    def _custom_output(self, item: CustomToolCallOutput) -> Sequence[Item | Unknown]:
        return [item] if self._custom else [FunctionCallOutput(item.output, item.call_id, item.id, item.status)]

    def _local_shell(self, item: hosted.LocalShellCall) -> Sequence[Item | Unknown]:
        arguments = msgspec.to_builtins(item.action)
        arguments.pop("type", None)
        return self._call("local_shell", item.call_id, arguments)

    def _local_shell_output(self, item: hosted.LocalShellCallOutput) -> Sequence[Item | Unknown]:
        return [FunctionCallOutput(item.output, item.call_id, status=item.status)]

    def _shell(self, item: hosted.ShellCall) -> Sequence[Item | Unknown]:
        return self._call("shell", item.call_id, item.action)

    def _shell_output(self, item: hosted.ShellCallOutput) -> Sequence[Item | Unknown]:
        return [FunctionCallOutput(_dump(item.output), item.call_id, item.id, item.status)]

    def _patch(self, item: hosted.ApplyPatchCall) -> Sequence[Item | Unknown]:
        return self._call("apply_patch", item.call_id, item.operation)

    def _patch_output(self, item: hosted.ApplyPatchCallOutput) -> Sequence[Item | Unknown]:
        told = f"{item.status}: {item.output}" if item.output else str(item.status)
        return [FunctionCallOutput(told, item.call_id, item.id, "completed")]

    def _computer(self, item: hosted.ComputerCall) -> Sequence[Item | Unknown]:
        arguments = {"actions": item.actions} if item.actions is not None else {"action": item.action}
        return self._call("computer", item.call_id, arguments)

    def _computer_output(self, item: hosted.ComputerCallOutput) -> Sequence[Item | Unknown]:
        seen = item.output
        shown: list[Part | Unknown] = [InputText("A screenshot was taken, but images cannot be shown here.")]
        if self._images:
            shown = [InputImage(seen.detail, seen.file_id, seen.image_url)]
        return [FunctionCallOutput(shown, item.call_id, item.id, "completed")]

    # The search for tools: a server's search has no call id, so its two items belong together by their order

    def _search(self, item: hosted.ToolSearchCall) -> Sequence[Item | Unknown]:
        self._searches += item.call_id is None
        return self._call("tool_search", item.call_id or f"call_search_{self._searches}", item.arguments)

    def _search_output(self, item: hosted.ToolSearchOutput) -> Sequence[Item | Unknown]:
        found = [tool for tool in item.tools if not isinstance(tool, Unknown)]
        return [
            FunctionCallOutput(
                describe_found_tools(found, self._catalog), item.call_id or f"call_search_{self._searches}"
            )
        ]

    def _nothing(self, item: Item) -> Sequence[Item | Unknown]:
        """Its effect is on the tools and the settings of the turn."""
        return []

    # What other servers carried out

    def _receipt(self, item: Any) -> Sequence[Item | Unknown]:
        """A call together with its result: as a call and its output."""
        given, come = _RECEIPTS[type(item)](item)
        call_id = item.id
        return [*self._call(item.type.removesuffix("_call"), call_id, given), FunctionCallOutput(_dump(come), call_id)]

    def _program(self, item: hosted.Program) -> Sequence[Item | Unknown]:
        return self._call("program", item.call_id, {"code": item.code})

    def _program_output(self, item: hosted.ProgramOutput) -> Sequence[Item | Unknown]:
        return [FunctionCallOutput(item.result, item.call_id, item.id, item.status)]

    def _approval(self, item: hosted.McpApprovalResponse) -> Sequence[Item | Unknown]:
        return [_tell("user", _dump(item))]

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Item | Unknown]]]] = {
        FunctionCall: _function_call,
        CustomToolCall: _custom_call,
        CustomToolCallOutput: _custom_output,
        hosted.LocalShellCall: _local_shell,
        hosted.LocalShellCallOutput: _local_shell_output,
        hosted.ShellCall: _shell,
        hosted.ShellCallOutput: _shell_output,
        hosted.ApplyPatchCall: _patch,
        hosted.ApplyPatchCallOutput: _patch_output,
        hosted.ComputerCall: _computer,
        hosted.ComputerCallOutput: _computer_output,
        hosted.ToolSearchCall: _search,
        hosted.ToolSearchOutput: _search_output,
        hosted.AdditionalTools: _nothing,
        ConfigurationUpdate: _nothing,
        hosted.Program: _program,
        hosted.ProgramOutput: _program_output,
        hosted.McpApprovalResponse: _approval,
        hosted.McpCall: _receipt,
        hosted.McpListTools: _receipt,
        hosted.FileSearchCall: _receipt,
        hosted.WebSearchCall: _receipt,
        hosted.CodeInterpreterCall: _receipt,
        hosted.ImageGenerationCall: _receipt,
    }


def _split(*given: str) -> Callable[[Any], tuple[Any, Any]]:
    """Divide a receipt in what was asked (these fields) and what came of it (the others)."""

    def divide(item: Any) -> tuple[Any, Any]:
        fields = {name: value for name, value in msgspec.to_builtins(item).items() if name not in ("id", "type")}
        asked = {name: fields.pop(name) for name in given if name in fields}
        return asked, fields

    return divide


_RECEIPTS: dict[type, Callable[[Any], tuple[Any, Any]]] = {
    hosted.McpCall: _split("server_label", "name", "arguments", "approval_request_id"),
    hosted.McpListTools: _split("server_label"),
    hosted.FileSearchCall: _split("queries"),
    hosted.WebSearchCall: _split("action"),
    hosted.CodeInterpreterCall: _split("code", "container_id"),
    hosted.ImageGenerationCall: _split("action", "size", "quality", "background"),
}


def describe_found_tools(tools: Iterable[Any], catalog: Catalog) -> str:
    """What a model hears of the tools it searched for; how they are called, it sees among its tools."""
    names = [
        catalog.name_of(ToolKey("named", namespace, tool.name))
        for namespace, tool in _names_of(tools)
        if getattr(tool, "name", None)
    ]
    return f"These tools can be called now: {', '.join(names)}" if names else "No tools were found."


def _names_of(tools: Iterable[Any]) -> Iterable[tuple[str | None, Any]]:
    for tool in tools:
        if tool.type == "namespace":
            yield from ((tool.name, child) for child in tool.tools if not isinstance(child, Unknown))
        else:
            yield None, tool


def _tell(role: Literal["user", "assistant"], text: str) -> Message:
    part = OutputText(text) if role == "assistant" else InputText(text)
    return Message(role, [part], status="completed")


def _dump(value: Any) -> str:
    return value if isinstance(value, str) else codec.encode(value).decode()
