"""Item types, ids and pages: the form in which items are stored, compared and listed."""

from collections.abc import Iterable, Sequence
from typing import Literal, cast

import msgspec

from antiphon.engine.respond.ids import FIRST_NUMBERS, Mint
from antiphon.errors import InvalidRequest
from antiphon.protocol import validation
from antiphon.protocol.content import InputText, OutputText, extract_text
from antiphon.protocol.hosted import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    ComputerCall,
    ComputerCallOutput,
    FileSearchCall,
    ImageGenerationCall,
    LocalShellCall,
    LocalShellCallOutput,
    McpCall,
    McpListTools,
    Program,
    ProgramOutput,
    ShellCall,
    ShellCallOutput,
    ToolSearchCall,
    ToolSearchOutput,
    WebSearchCall,
)
from antiphon.protocol.items import (
    UNKNOWN_ID_PREFIX,
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    ItemReference,
    Items,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown, copy_struct

# Tuples: `isinstance` is several times slower with a union, and it runs for every item.
CALL_TYPES = (FunctionCall, CustomToolCall, ComputerCall, ShellCall, LocalShellCall, ApplyPatchCall, ToolSearchCall)
OUTPUT_TYPES = (
    FunctionCallOutput,
    CustomToolCallOutput,
    ComputerCallOutput,
    ShellCallOutput,
    LocalShellCallOutput,
    ApplyPatchCallOutput,
    ToolSearchOutput,
)
# For `type(item) in PAIRED_TYPES`, the fastest test. No item type has a subclass.
PAIRED_TYPES = frozenset((*CALL_TYPES, *OUTPUT_TYPES))
_CORRECTED_TYPES = frozenset({LocalShellCallOutput, ToolSearchCall, ToolSearchOutput})
_ID_PREFIXES: dict[type, str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    CustomToolCall: "ctc",
    CustomToolCallOutput: "ctco",
    CodeInterpreterCall: "ci",
    ComputerCall: "cu",
    FileSearchCall: "fs",
    ImageGenerationCall: "ig",
    LocalShellCall: "lsh",
    LocalShellCallOutput: "lsho",
    McpCall: "mcp",
    McpListTools: "mcpl",
    Program: "cm",
    ProgramOutput: "cmo",
    WebSearchCall: "ws",
    Reasoning: "rs",
    Compaction: "cmp",
}
# Item types whose id is not checked when the request is decoded.
_TYPES_WITH_UNCHECKED_ID = frozenset({Unknown, ItemReference})


class ItemPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items, as the API lists them."""

    object: Literal["list"] = "list"
    data: Items
    first_id: str | None
    last_id: str | None
    has_more: bool


def make_page(items: Sequence[Item | Unknown], *, has_more: bool) -> ItemPage:
    return ItemPage(
        data=list(items),
        first_id=items[0].id if items else None,
        last_id=items[-1].id if items else None,
        has_more=has_more,
    )


class _ItemId(msgspec.Struct):
    id: str | None = None


_id_decoder = msgspec.json.Decoder(_ItemId)


def check_item_ids(items: Sequence[Item | Unknown], *, param: str = "input") -> None:
    """Raise InvalidRequest on an id that is not a string, or an empty id in an item reference."""
    if _TYPES_WITH_UNCHECKED_ID.isdisjoint(map(type, items)):  # the common case
        return
    for index, item in enumerate(items):
        if isinstance(item, Unknown):
            try:
                _id_decoder.decode(item.raw)
            except msgspec.ValidationError as error:
                fault = validation.parse_error(error)
                raise validation.FieldError(
                    f"{param}[{index}].{fault.path}", fault.reason
                ).to_invalid_request() from None
        elif isinstance(item, ItemReference) and not item.id:
            where = f"{param}[{index}].id"
            raise InvalidRequest(f"Invalid value for '{where}': it is empty.", param=where, code="invalid_value")


def normalize_item(item: Item | Unknown, mint: Mint) -> Item | Unknown:
    """Return the item in its stored form: with an id and a status, and a message's text as a content part."""
    if type(item) is Message:
        content = item.content
        if isinstance(content, str):
            content = [OutputText(content) if item.role == "assistant" else InputText(content)]
        return Message(item.role, content, item.id or mint.new_id("msg"), item.status or "completed", item.phase)
    if type(item) is FunctionCall or type(item) is FunctionCallOutput:  # the other types need the further tests
        call = copy_struct(item)
        if not call.id:
            call.id = mint.new_id("fc" if type(call) is FunctionCall else "fco")
        if call.status is None:
            call.status = "completed"
        return call
    if isinstance(item, Unknown):
        return _normalize_unknown(item, mint)
    # `copy`, not `replace`: `replace` would validate the content again, for every item of every request.
    stored = copy_struct(item)
    if type(stored) in _CORRECTED_TYPES:
        _correct_call_id(stored)
    if not stored.id:  # some clients send an empty id
        stored.id = mint.new_id(_ID_PREFIXES.get(type(stored), "item"))
    if getattr(stored, "status", "none") is None:
        cast(FunctionCall, stored).status = "completed"
    return stored


def _correct_call_id(stored: Item) -> None:
    """Correct a call id that is in the wrong field, or that a search of the server has got from a client."""
    if isinstance(stored, LocalShellCallOutput):
        if stored.call_id == stored.id:
            stored.given_call_id, stored.id = stored.id, ""
    elif isinstance(stored, ToolSearchCall | ToolSearchOutput) and stored.execution == "server":
        stored.call_id = None  # some clients send the id of the item, and no output


def normalize_items(items: Iterable[Item | Unknown], mint: Mint) -> list[Item | Unknown]:
    if type(mint) is not Mint:
        return [normalize_item(item, mint) for item in items]
    normalized: list[Item | Unknown] = []
    prefix = f"msg_{mint.token}"
    for item in items:
        # The common case, without a call for each message and for each id.
        if type(item) is Message and type(item.content) is list:
            item_id, minted = item.id, mint.minted
            if not item_id and minted < len(FIRST_NUMBERS):
                item_id = prefix + FIRST_NUMBERS[minted]
                mint.minted = minted + 1
            item_id = item_id or mint.new_id("msg")
            normalized.append(Message(item.role, item.content, item_id, item.status or "completed", item.phase))
        else:
            normalized.append(normalize_item(item, mint))
    return normalized


def _normalize_unknown(item: Unknown, mint: Mint) -> Unknown:
    """Add an id if there is none, because pages are addressed by item id. Every other field stays unchanged."""
    fields = msgspec.json.decode(item.raw, type=dict[str, msgspec.Raw])
    if bytes(fields.get("id", b"null")) not in (b"null", b'""'):
        return item
    fields["id"] = msgspec.Raw(msgspec.json.encode(mint.new_id(UNKNOWN_ID_PREFIX)))
    return Unknown(msgspec.json.encode(fields))


def get_comparable_text(item: Item | Unknown) -> tuple[str, ...]:
    """Return the text by which two items with one id are compared; for a call, its call id."""
    if isinstance(item, Message):
        return item.role, extract_text(item.content)
    if isinstance(item, (FunctionCallOutput, CustomToolCallOutput, LocalShellCallOutput)):
        return (extract_text(item.output),)
    return (item.call_id,) if isinstance(item, CALL_TYPES) and item.call_id is not None else ()
