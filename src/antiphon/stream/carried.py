"""Output items and events that another server tells in its own words: they keep them, and get our ids and numbers."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from antiphon.protocol import codec
from antiphon.protocol.items import ITEMS, CompactionTrigger, ConfigurationUpdate, ItemReference, OutputItem
from antiphon.protocol.open import Unknown
from antiphon.stream.drafts import Draft, Ending

_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
# What an item is while it is under way.
_ONGOING = frozenset({"in_progress", "searching", "interpreting", "generating", "calling"})


_ONLY_INPUT = (CompactionTrigger, ItemReference, ConfigurationUpdate)


class CarriedDraft(Draft):
    """An item that is told as its server tells it, from `OpenItem` to `CloseItem`."""

    prefix = "item"

    def __init__(self, item_id: str, output_index: int, numbers: Iterator[int], item: OutputItem | Unknown) -> None:
        super().__init__(item_id, output_index, numbers)
        self._item = set_id(item, item_id)
        self.closed = False

    def announce(self) -> list[Any]:
        return [self._added(self._item)]

    def finish(self, item: OutputItem | Unknown) -> None:
        """What it has come to."""
        self._item = set_id(item, self.id)

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


def retell(event: Unknown, number: int, draft: Draft | None) -> Unknown:
    """The event with this number, and if it is about an item, with that item's id and index."""
    fields = _FIELDS.decode(event.raw)
    if draft is not None:
        if "item_id" in fields:
            fields["item_id"] = _encode(draft.id)
        if "output_index" in fields:
            fields["output_index"] = _encode(draft.output_index)
        if "item" in fields:
            fields["item"] = Raw(set_id(Unknown(bytes(fields["item"])), draft.id).raw)
    fields["sequence_number"] = _encode(number)
    return Unknown(msgspec.json.encode(fields))


def set_id(item: Any, item_id: str) -> Any:
    """The same item under another id."""
    if not isinstance(item, Unknown):
        return msgspec.structs.replace(item, id=item_id)
    fields = _FIELDS.decode(item.raw)
    fields["id"] = _encode(item_id)
    return Unknown(msgspec.json.encode(fields))


def amend(item: OutputItem | Unknown, fields: dict[str, Raw]) -> Any:
    """The item with these fields, as one of the types we know if it fits."""
    amended = _FIELDS.decode(codec.encode(item)) | fields
    return keep_item(msgspec.json.encode(amended))


def keep_item(raw: bytes) -> OutputItem | Unknown:
    """An item of another server: what is not in a form we know, or has more in it, stays as it came."""
    try:
        item = ITEMS.keep(raw)
    except msgspec.ValidationError:  # not even a type
        return Unknown(raw)
    return Unknown(raw) if isinstance(item, _ONLY_INPUT) else item


def find_prefix(item: OutputItem | Unknown) -> str:
    """How ids of its kind begin, from the id it has."""
    prefix, _, rest = (item.id or "").partition("_")
    return prefix if rest and prefix.isalnum() else CarriedDraft.prefix


def _encode(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def _is_ongoing(raw: Raw | None) -> bool:
    status = None if raw is None else msgspec.json.decode(raw)
    return isinstance(status, str) and status in _ONGOING
