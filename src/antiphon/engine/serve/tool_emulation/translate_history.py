"""Translation of history items for a backend that only supports messages and function calls."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import Catalog, ToolKey
from antiphon.engine.serve.tool_emulation.program_history import remove_nested_calls
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
    remove_own_id,
)
from antiphon.protocol.unions import Unknown
from antiphon.tools.hosted.file_search.citations import make_marker

Items = list[Item | Unknown]
# Item types that every backend supports or ignores.
READABLE_TYPES = frozenset({Message, FunctionCall, FunctionCallOutput, Reasoning, Compaction, CompactionTrigger})
# The fields of hosted calls that are arguments. The other fields are the result.
_ARGUMENT_FIELDS: dict[type, tuple[str, ...]] = {
    hosted.FileSearchCall: ("queries",),
    hosted.WebSearchCall: ("action",),
    hosted.CodeInterpreterCall: ("code",),
    hosted.ImageGenerationCall: ("action", "size", "quality", "background"),
}
# The functions of a server are tools of the turn, so its list is not repeated in the context.
_HOSTED_TYPES = frozenset(
    {hosted.McpCall, hosted.McpListTools, hosted.Program, hosted.ProgramOutput, *_ARGUMENT_FIELDS}
)
# An image in the output of a program.
_IMAGE = re.compile(r"!\[image\]\(([^\s()]+)\)")


class HostedCallText(NamedTuple):
    """A call of a hosted tool as the model made it. `arguments` are None if they have to be derived from its item."""

    call_id: str
    name: str
    arguments: str | None


NO_PASSAGES = "The search found nothing."


def is_readable(item: Item | Unknown) -> bool:
    return type(item) in READABLE_TYPES and (type(item) is not FunctionCall or item.namespace is None)


def are_all_readable(items: Sequence[Item | Unknown]) -> bool:
    kinds = set(map(type, items))
    if not kinds <= READABLE_TYPES:
        return False
    if FunctionCall in kinds:
        for item in items:
            if type(item) is FunctionCall and item.namespace is not None:
                return False
    return True


def translate_items(items: Iterable[Item | Unknown], catalog: Catalog, *, custom: bool, images: bool) -> Items:
    """Return the items for a backend. `custom` and `images`: the backend supports custom tools and images itself."""
    items = remove_nested_calls(list(items))
    translator = _ItemTranslator(items, catalog, custom=custom, images=images)
    translated: Items = []
    for item in items:
        translated += [item] if is_readable(item) else translator.translate(item)
    return translated


def has_hosted_items(items: Iterable[Item | Unknown]) -> bool:
    return not _HOSTED_TYPES.isdisjoint(map(type, items))


def translate_hosted_items(
    items: Iterable[Item | Unknown],
    get_name: Callable[[Any], str],
    *,
    calls: Mapping[str, HostedCallText] | None = None,
    numbers: Iterator[int],
    images: bool,
    citations: Iterator[int] | None = None,
    resumed: str | None = None,
) -> Items:
    """Return the items with a function call and its output for each hosted call.

    `get_name` returns the name of the function for an item. `calls` has, by item id, the calls of this response.
    `numbers` are those of the next other hosted calls: all call ids of a prompt must differ. `citations` are the
    numbers of the next results of file searches. `resumed` is the call id of a program that this response continues.
    """
    translated: Items = []
    for item in remove_nested_calls(list(items), resumed):
        call = calls.get(item.id or "") if calls else None
        if isinstance(item, hosted.Program):
            arguments = (call and call.arguments) or _dump({"code": item.code})
            translated.append(FunctionCall(item.call_id, get_name(item), arguments, status="completed"))
        elif isinstance(item, hosted.ProgramOutput):
            translated.append(_translate_program_output(item, images=images))
        elif call is not None or type(item) in _HOSTED_TYPES:
            call = call or HostedCallText(_make_hosted_call_id(next(numbers)), get_name(item), None)
            translated += _translate_hosted_item(item, call, images=images, citations=citations)
        else:
            translated.append(item)
    return translated


def _translate_hosted_item(
    item: Any, call: HostedCallText, *, images: bool, citations: Iterator[int] | None = None
) -> Items:
    """Split a hosted item into a function call and its output."""
    if isinstance(item, hosted.McpListTools):
        return []
    arguments, result = _split_hosted_call(item, images=images, citations=citations)
    if call.arguments is not None:
        arguments = call.arguments
    output = FunctionCallOutput(result, call.call_id, status="completed")
    return [FunctionCall(call.call_id, call.name, arguments, status="completed"), output]


def _make_hosted_call_id(number: int) -> str:
    """Return the call id of the hosted call with this number in the history.

    The id of its item is new in every request if the client omits it. In the prompt, it would make the upstream's
    cache useless.
    """
    return f"call_hosted_{number}"


class _ItemTranslator:
    def __init__(self, items: Items, catalog: Catalog, *, custom: bool, images: bool) -> None:
        self._catalog = catalog
        self._requests = {item.id for item in items if isinstance(item, hosted.McpApprovalRequest)}
        self._decisions = {
            item.approval_request_id: item for item in items if isinstance(item, hosted.McpApprovalResponse)
        }
        self._custom = custom
        self._images = images
        self._searches = self._search_outputs = 0
        self._hosted_calls = 0

    def translate(self, item: Item | Unknown) -> Sequence[Item | Unknown]:
        if isinstance(item, Unknown):
            return [_make_message("user", remove_own_id(item).raw.decode(errors="replace"))]
        handler = self._HANDLERS.get(type(item))
        return handler(self, item) if handler is not None else [_make_message("assistant", _dump(item))]

    def _make_call(self, kind: str, call_id: str, arguments: Any) -> list[Item | Unknown]:
        text = _dump(arguments)
        return [FunctionCall(call_id, self._catalog.get_backend_name(ToolKey(kind)), text, status="completed")]

    # Client-side calls and their outputs

    def _function_call(self, item: FunctionCall) -> Sequence[Item | Unknown]:
        name = self._catalog.get_backend_name(ToolKey("named", item.namespace, item.name))
        return [msgspec.structs.replace(item, name=name, namespace=None)]

    def _custom_call(self, item: CustomToolCall) -> Sequence[Item | Unknown]:
        name = self._catalog.get_backend_name(ToolKey("named", item.namespace, item.name))
        if self._custom:
            return [msgspec.structs.replace(item, name=name, namespace=None)]
        return [FunctionCall(item.call_id, name, _dump({"input": item.input}), item.id, item.status)]

    def _custom_output(self, item: CustomToolCallOutput) -> Sequence[Item | Unknown]:
        return [item] if self._custom else [FunctionCallOutput(item.output, item.call_id, item.id, item.status)]

    def _local_shell(self, item: hosted.LocalShellCall) -> Sequence[Item | Unknown]:
        arguments = msgspec.to_builtins(item.action)
        arguments.pop("type", None)
        return self._make_call("local_shell", item.call_id, arguments)

    def _local_shell_output(self, item: hosted.LocalShellCallOutput) -> Sequence[Item | Unknown]:
        return [FunctionCallOutput(item.output, item.call_id, status=item.status)]

    def _shell(self, item: hosted.ShellCall) -> Sequence[Item | Unknown]:
        return self._make_call("shell", item.call_id, item.action)

    def _shell_output(self, item: hosted.ShellCallOutput) -> Sequence[Item | Unknown]:
        return [FunctionCallOutput(_dump(item.output), item.call_id, item.id, item.status)]

    def _patch(self, item: hosted.ApplyPatchCall) -> Sequence[Item | Unknown]:
        return self._make_call("apply_patch", item.call_id, item.operation)

    def _patch_output(self, item: hosted.ApplyPatchCallOutput) -> Sequence[Item | Unknown]:
        text = f"{item.status}: {item.output}" if item.output else str(item.status)
        return [FunctionCallOutput(text, item.call_id, item.id, "completed")]

    def _computer(self, item: hosted.ComputerCall) -> Sequence[Item | Unknown]:
        arguments = {"actions": item.actions} if item.actions is not None else {"action": item.action}
        return self._make_call("computer", item.call_id, arguments)

    def _computer_output(self, item: hosted.ComputerCallOutput) -> Sequence[Item | Unknown]:
        screenshot = item.output
        parts: list[Part | Unknown] = [InputText("A screenshot was taken, but images cannot be shown here.")]
        if self._images:
            parts = [InputImage(screenshot.detail, screenshot.file_id, screenshot.image_url)]
        return [FunctionCallOutput(parts, item.call_id, item.id, "completed")]

    # Tool searches: those of the server have no call id, so the outputs belong to the calls in their order

    def _search(self, item: hosted.ToolSearchCall) -> Sequence[Item | Unknown]:
        self._searches += item.call_id is None
        return self._make_call("tool_search", item.call_id or f"call_search_{self._searches}", item.arguments)

    def _search_output(self, item: hosted.ToolSearchOutput) -> Sequence[Item | Unknown]:
        self._search_outputs += item.call_id is None
        found = [tool for tool in item.tools if not isinstance(tool, Unknown)]
        call_id = item.call_id or f"call_search_{self._search_outputs}"
        return [FunctionCallOutput(describe_found_tools(found, self._catalog), call_id)]

    def _drop(self, item: Item) -> Sequence[Item | Unknown]:
        """Drop an item that was applied to the turn's tools or settings."""
        return []

    # Calls that other servers ran

    def _hosted_call(self, item: Any) -> Sequence[Item | Unknown]:
        """Split an item with a call and its result into a call and an output."""
        is_mcp = isinstance(item, hosted.McpCall)
        key = ToolKey("named", None, item.name) if is_mcp else ToolKey(item.type.removesuffix("_call"))
        self._hosted_calls += 1
        call = HostedCallText(_make_hosted_call_id(self._hosted_calls), self._catalog.get_backend_name(key), None)
        return _translate_hosted_item(item, call, images=self._images)

    def _program(self, item: hosted.Program) -> Sequence[Item | Unknown]:
        return self._make_call("programmatic_tool_calling", item.call_id, {"code": item.code})

    def _program_output(self, item: hosted.ProgramOutput) -> Sequence[Item | Unknown]:
        return [_translate_program_output(item, images=self._images)]

    def _approval(self, item: hosted.McpApprovalResponse) -> Sequence[Item | Unknown]:
        return [] if item.approval_request_id in self._requests else [_make_message("user", _dump(item))]

    def _approval_request(self, item: hosted.McpApprovalRequest) -> Sequence[Item | Unknown]:
        """Translate a call that was not approved. An approved one has an item of its own."""
        decision = self._decisions.get(item.id)
        if decision is not None and decision.approve:
            return []
        text = "The user did not approve this call. It was not executed."
        if decision is not None and decision.reason:
            text += f" Reason: {decision.reason}"
        name = self._catalog.get_backend_name(ToolKey("named", None, item.name))
        call = FunctionCall(item.id, name, item.arguments, status="completed")
        return [call, FunctionCallOutput(text, item.id, status="completed")]

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
        hosted.AdditionalTools: _drop,
        ConfigurationUpdate: _drop,
        hosted.Program: _program,
        hosted.ProgramOutput: _program_output,
        hosted.McpApprovalRequest: _approval_request,
        hosted.McpApprovalResponse: _approval,
        hosted.McpCall: _hosted_call,
        hosted.McpListTools: _drop,
        hosted.FileSearchCall: _hosted_call,
        hosted.WebSearchCall: _hosted_call,
        hosted.CodeInterpreterCall: _hosted_call,
        hosted.ImageGenerationCall: _hosted_call,
    }


def _translate_program_output(item: hosted.ProgramOutput, *, images: bool) -> FunctionCallOutput:
    """Return the output of a program, with its images as content parts."""
    urls = _IMAGE.findall(item.result)
    if not urls:
        return FunctionCallOutput(item.result, item.call_id, item.id, "completed")
    text = _IMAGE.sub("(an image)" if images else "(an image that cannot be shown here)", item.result)
    parts: list[Part | Unknown] = [InputText(text)]
    if images:
        parts += [InputImage(image_url=url) for url in urls]
    return FunctionCallOutput(parts, item.call_id, item.id, "completed")


def _split_hosted_call(
    item: Any, *, images: bool, citations: Iterator[int] | None
) -> tuple[str, str | list[Part | Unknown]]:
    """Return the arguments and the result of a hosted call as the model reads them."""
    if isinstance(item, Unknown):
        return "", item.raw.decode(errors="replace")
    if isinstance(item, hosted.McpCall):
        return item.arguments, item.output if item.error is None and item.output is not None else _dump(
            {"status": item.status, "error": item.error}
        )
    fields = msgspec.to_builtins(item)
    result = {name: value for name, value in fields.items() if name not in ("id", "type")}
    arguments = {name: result.pop(name) for name in _ARGUMENT_FIELDS.get(type(item), ()) if name in result}
    is_found = isinstance(item, hosted.FileSearchCall) and item.results is not None and item.status != "failed"
    if citations is not None and is_found:
        return _dump(arguments), _format_passages(item.results, citations)
    pictures = _take_pictures(item, result)
    if not pictures or not images:
        return _dump(arguments), _dump(result)
    return _dump(arguments), [InputText(_dump(result)), *(InputImage(image_url=url) for url in pictures)]


def _format_passages(results: Sequence[hosted.FileSearchResult], citations: Iterator[int]) -> str:
    """Return passages of files as plain text, each after its citation marker and its file. Small models copy JSON."""
    passages = [
        f"{make_marker(next(citations))} {each.filename}{_format_attributes(each)}\n{each.text}" for each in results
    ]
    return "\n\n".join(passages) or NO_PASSAGES


def _format_attributes(result: hosted.FileSearchResult) -> str:
    return f" {_dump(result.attributes)}" if result.attributes else ""


def _take_pictures(item: Any, result: dict[str, Any]) -> list[str]:
    """Remove the images from a result and return their URLs: as text they would fill the context."""
    if isinstance(item, hosted.ImageGenerationCall) and item.result:
        result["result"] = "The image was created and shown to the user."
        return [f"data:image/{item.output_format or 'png'};base64,{item.result}"]
    if not isinstance(item, hosted.CodeInterpreterCall):
        return []
    shown = [output for output in result.get("outputs") or () if output.get("type") == "image"]
    return [url for output in shown if isinstance(url := output.pop("url", None), str)]


def describe_found_tools(tools: Iterable[Any], catalog: Catalog) -> str:
    """Return the output of a tool search for the model: the backend names of the found tools."""
    names = [
        catalog.get_backend_name(ToolKey("named", namespace, tool.name))
        for namespace, tool in _list_named_tools(tools)
        if getattr(tool, "name", None)
    ]
    return f"These tools can be called now: {', '.join(names)}" if names else "No tools were found."


def _list_named_tools(tools: Iterable[Any]) -> Iterable[tuple[str | None, Any]]:
    for tool in tools:
        if tool.type == "namespace":
            yield from ((tool.name, child) for child in tool.tools if not isinstance(child, Unknown))
        else:
            yield None, tool


def _make_message(role: Literal["user", "assistant"], text: str) -> Message:
    part = OutputText(text) if role == "assistant" else InputText(text)
    return Message(role, [part], status="completed")


def _dump(value: Any) -> str:
    return value if isinstance(value, str) else codec.encode(value).decode()
