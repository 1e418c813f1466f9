"""Limits on the numbers of items, content parts and tools in a request.

Some steps take time in proportion to these numbers. The limits are far above the requests of real clients.
"""

from collections.abc import Sequence

from antiphon.engine.policy import Policy
from antiphon.errors import InvalidRequest
from antiphon.offload import LARGE_BYTES, is_large
from antiphon.protocol.items import CustomToolCallOutput, FunctionCallOutput, Item, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import NamespaceTool
from antiphon.protocol.unions import Unknown

# The length of the shortest content part in JSON.
_PART_BYTES = len('{"type":"text"}')


def check_counts(request: CreateRequest, policy: Policy) -> None:
    """Raise InvalidRequest if the request has too many items, parts or tools."""
    if isinstance(request.input, list):
        if len(request.input) > policy.max_input_items:
            raise _make_error(len(request.input), policy.max_input_items, param="input", setting="max_input_items")
        # Other requests are too short for as many parts.
        if is_large() or policy.max_content_parts < LARGE_BYTES // _PART_BYTES:
            check_parts(request.input, policy)
    if request.tools:
        count = len(request.tools)
        if NamespaceTool in map(type, request.tools):
            count += sum(len(tool.tools) for tool in request.tools if isinstance(tool, NamespaceTool))
        if count > policy.max_tools:
            raise _make_error(count, policy.max_tools, param="tools", setting="max_tools")


def check_parts(items: Sequence[Item | Unknown], policy: Policy, *, param: str = "input") -> None:
    """Raise InvalidRequest if the items together have too many content parts."""
    total = 0
    for index, item in enumerate(items):
        total += _count_parts(item)
        if total > policy.max_content_parts:
            limit, path = policy.max_content_parts, f"{param}[{index}]"
            raise _make_error(total, limit, param=path, setting="max_content_parts")


def _count_parts(item: Item | Unknown) -> int:
    if isinstance(item, Message):
        return 1 if isinstance(item.content, str) else len(item.content)
    if isinstance(item, (FunctionCallOutput, CustomToolCallOutput)):
        return 1 if isinstance(item.output, str) else len(item.output)
    return len(item.content or ()) + len(item.summary) if isinstance(item, Reasoning) else 0


def _make_error(count: int, limit: int, *, param: str, setting: str) -> InvalidRequest:
    noun = "content parts" if setting == "max_content_parts" else "elements"
    message = f"too many {noun}. This server accepts at most {limit} (setting {setting}), but got {count}."
    return InvalidRequest(f"Invalid '{param}': {message}", param=param, code="array_above_max_length")
