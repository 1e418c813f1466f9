"""Output items and events that another server tells in its own words: they keep them, and get our ids and numbers."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.items import ITEMS, CompactionTrigger, ConfigurationUpdate, ItemReference, OutputItem
from antiphon.protocol.unions import Unknown
from antiphon.stream.drafts import Draft, Ending

_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
# What an item is while it is under way.
_ONGOING = frozenset({"in_progress", "searching", "interpreting", "generating", "calling"})


_ONLY_INPUT = (CompactionTrigger, ItemReference, ConfigurationUpdate)


class PassthroughDraft(Draft):
    """An item that is told as its server tells it, from `OpenItem` to `CloseItem`."""

    prefix = "item"

    def __init__(
        self, item_id: str, output_index: int, numbers: Iterator[int], item: OutputItem | Unknown, call_id: str | None
    ) -> None:
        super().__init__(item_id, output_index, numbers)
        self.call_id = call_id
        self._item = replace_ids(item, item_id, call_id)
        self.closed = False

    def announce(self) -> list[Any]:
        return [self._added(self._item)]

    def finish(self, item: OutputItem | Unknown, call_id: str | None) -> None:
        """What it has come to."""
        self._item = replace_ids(item, self.id, call_id)

    def close(self, ending: Ending) -> tuple[list[Any], OutputItem | Unknown]:
        """Whoever reads that an item is done must not read in it that it is not."""
        self.closed = True
        item = self._item
        if not isinstance(item, Unknown):
            if getattr(item, "status", None) in _ONGOING:
                item = msgspec.structs.replace(item, status=ending)
        elif _is_ongoing(_FIELDS.decode(item.raw).get("status")):
            item = amend(item, {"status": _encode(ending)})
        return [self._done(item)], item


def rewrite_event(event: Unknown, numbers: Iterator[int], draft: Draft | None) -> Unknown:
    """The event with the next number, and if it is about an item, with that item's id and index."""
    fields = _FIELDS.decode(event.raw)
    if draft is not None:
        if "item_id" in fields:
            fields["item_id"] = _encode(draft.id)
        if "output_index" in fields:
            fields["output_index"] = _encode(draft.output_index)
        if "item" in fields:
            fields["item"] = Raw(replace_ids(Unknown(bytes(fields["item"])), draft.id).raw)
    fields["sequence_number"] = _encode(next(numbers))
    return Unknown(msgspec.json.encode(fields))


def get_sequence_number(event: Event | Unknown) -> int:
    """The number of an event that was told."""
    if not isinstance(event, Unknown):
        return event.sequence_number
    return msgspec.json.decode(_FIELDS.decode(event.raw)["sequence_number"], type=int)


def replace_ids(item: Any, item_id: str | None, call_id: str | None = None) -> Any:
    """The same item under another id, and, if it is about a call, with another id of that."""
    ids = {name: value for name, value in (("id", item_id), ("call_id", call_id)) if value is not None}
    if not isinstance(item, Unknown):
        return msgspec.structs.replace(item, **ids)
    fields = _FIELDS.decode(item.raw)
    fields |= {name: _encode(value) for name, value in ids.items()}
    return Unknown(msgspec.json.encode(fields))


def get_call_id(item: OutputItem | Unknown) -> str | None:
    """The id of the call that this item is, or answers, if it has a field for it."""
    if not isinstance(item, Unknown):
        return getattr(item, "call_id", None) if "call_id" in item.__struct_fields__ else None
    if not item.type.endswith(("_call", "_output")):
        return None
    raw = _FIELDS.decode(item.raw).get("call_id")
    call_id = None if raw is None else msgspec.json.decode(raw)
    return call_id if isinstance(call_id, str) else None


def amend(item: OutputItem | Unknown, fields: dict[str, Raw]) -> Any:
    """The item with these fields, as one of the types we know if it fits."""
    amended = _FIELDS.decode(codec.encode(item)) | fields
    return decode_output_item(msgspec.json.encode(amended))


def decode_output_item(raw: bytes) -> OutputItem | Unknown:
    """An item of another server: what is not in a form we know, or has more in it, stays as it came."""
    try:
        item = ITEMS.decode_lossless(raw)
    except (msgspec.ValidationError, RecursionError):  # not even a type, or deeper than can be looked into
        return Unknown(raw)
    return Unknown(raw) if isinstance(item, _ONLY_INPUT) else item


def get_id_prefix(item: OutputItem | Unknown) -> str:
    """How ids of its kind begin, from the id it has."""
    prefix, _, rest = (item.id or "").partition("_")
    return prefix if rest and prefix.isalnum() else PassthroughDraft.prefix


def _encode(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def _is_ongoing(raw: Raw | None) -> bool:
    status = None if raw is None else msgspec.json.decode(raw)
    return isinstance(status, str) and status in _ONGOING
