"""Items on their way into the store, and in pages on their way out."""

from collections.abc import Sequence
from copy import copy
from typing import Literal, cast

import msgspec

from antiphon.engine.respond.ids import Mint
from antiphon.errors import InvalidRequest
from antiphon.protocol import validation
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import (
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
from antiphon.protocol.unions import Unknown


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


class _Named(msgspec.Struct):
    id: str | None = None


_named = msgspec.json.Decoder(_Named)
_UNCHECKED = frozenset({Unknown, ItemReference})


def check_named(items: Sequence[Item | Unknown], *, param: str = "input") -> None:
    """Raise on an id that can name nothing: one that is not a text, or an empty one in a reference."""
    if _UNCHECKED.isdisjoint(map(type, items)):  # nearly always
        return
    for index, item in enumerate(items):
        if isinstance(item, Unknown):
            try:
                _named.decode(item.raw)
            except msgspec.ValidationError as error:
                fault = validation.read(error)
                raise validation.Fault(f"{param}[{index}].{fault.path}", fault.reason).explain() from None
        elif isinstance(item, ItemReference) and not item.id:
            where = f"{param}[{index}].id"
            raise InvalidRequest(f"Invalid value for '{where}': it is empty.", param=where, code="invalid_value")


_PREFIXES: dict[type, str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    CustomToolCall: "ctc",
    CustomToolCallOutput: "ctco",
    LocalShellCallOutput: "lsho",
    Reasoning: "rs",
    Compaction: "cmp",
}


def identify(item: Item | Unknown, mint: Mint) -> Item | Unknown:
    """The item in the form that is stored: with an id and a status, a message's text in a part."""
    if isinstance(item, Unknown):
        return _identify_unknown(item, mint)
    # A copy, not `replace`: that would read the content anew, of every item of every request.
    stored = copy(item)
    if isinstance(stored, LocalShellCallOutput) and stored.call_id == stored.id:
        stored.named_call, stored.id = stored.id, ""
    if not stored.id:  # some clients send an empty one
        stored.id = mint(_PREFIXES.get(type(stored), "item"))
    if getattr(stored, "status", "none") is None:
        cast(Message, stored).status = "completed"
    if isinstance(stored, Message) and isinstance(stored.content, str):
        part = OutputText(stored.content) if stored.role == "assistant" else InputText(stored.content)
        stored.content = [part]
    return stored


def _identify_unknown(item: Unknown, mint: Mint) -> Unknown:
    """Everything but the id stays as it came. Without one, a page that ends here could not be turned."""
    fields = msgspec.json.decode(item.raw, type=dict[str, msgspec.Raw])
    if bytes(fields.get("id", b"null")) not in (b"null", b'""'):
        return item
    fields["id"] = msgspec.Raw(msgspec.json.encode(mint("item")))
    return Unknown(msgspec.json.encode(fields))
