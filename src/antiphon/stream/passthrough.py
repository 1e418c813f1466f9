"""Output items and events that an upstream sends in the Responses format.

They are forwarded unchanged, except for ids, output indexes and sequence numbers, which the composer assigns.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import CodeInterpreterCall, ImageGenerationCall, McpCall
from antiphon.protocol.items import ITEMS, CompactionTrigger, ConfigurationUpdate, ItemReference, OutputItem
from antiphon.protocol.unions import Unknown
from antiphon.stream.drafts import Draft, Ending, MessageDraft, ReasoningDraft

_FIELDS: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])
_ONGOING_STATUSES = frozenset({"in_progress", "searching", "interpreting", "generating", "calling"})
_INPUT_ONLY_TYPES = (CompactionTrigger, ItemReference, ConfigurationUpdate)
# Fields of items that the delta events of the item write in pieces.
_WRITTEN_FIELDS: dict[type, str] = {McpCall: "arguments", CodeInterpreterCall: "code"}
# The prefixes of the ids of whole items.
ID_PREFIXES = {
    "message": MessageDraft.prefix,
    "reasoning": ReasoningDraft.prefix,
    "image_generation_call": "ig",
    "shell_call": "sh",
    "local_shell_call": "lsh",
    "apply_patch_call": "apc",
    "mcp_approval_request": "mcpr",
    "program_output": "cmo",
    "computer_call": "cu",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


class _DeltaEvent(msgspec.Struct):
    delta: Any = None


class PassthroughDraft(Draft):
    """An output item in the form its upstream sends it, from `OpenItem` to `CloseItem`."""

    prefix = "item"

    def __init__(
        self, item_id: str, output_index: int, numbers: Iterator[int], item: OutputItem | Unknown, call_id: str | None
    ) -> None:
        super().__init__(item_id, output_index, numbers)
        self.call_id = call_id
        self._item = replace_ids(item, item_id, call_id)
        self.closed = False
        self._written_field = _WRITTEN_FIELDS.get(type(item))
        self._pieces: list[str] = []

    def announce(self) -> list[Any]:
        return [self._added(self._item)]

    def finish(self, item: OutputItem | Unknown, call_id: str | None) -> None:
        """Set the final form of the item."""
        self._item = replace_ids(item, self.id, call_id)
        self._pieces = []

    def read_event(self, event: Unknown) -> None:
        """Collect a field that is written in pieces, in case the item is cut off before its final form."""
        if self._written_field is not None:
            piece = msgspec.json.decode(event.raw, type=_DeltaEvent).delta
            if isinstance(piece, str):
                self._pieces.append(piece)

    def close(self, ending: Ending) -> tuple[list[Any], OutputItem | Unknown]:
        """Return the closing events and the item. An ongoing status becomes `ending`, since the item is done."""
        self.closed = True
        item = self._item
        if not isinstance(item, Unknown):
            if getattr(item, "status", None) in _ONGOING_STATUSES:
                written = {self._written_field: "".join(self._pieces)} if self._written_field and self._pieces else {}
                # Images have no status `incomplete`.
                is_failed = ending == "incomplete" and isinstance(item, ImageGenerationCall)
                item = msgspec.structs.replace(item, status="failed" if is_failed else ending, **written)
        elif _is_ongoing(_FIELDS.decode(item.raw).get("status")):
            item = merge_fields(item, {"status": _encode(ending)})
        return [self._done(item)], item


def rewrite_event(event: Unknown, numbers: Iterator[int], draft: Draft | None) -> Unknown:
    """Return the event with the next sequence number, and with the id and output index of `draft`, if given."""
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
    """Return the sequence number of a composed event."""
    if not isinstance(event, Unknown):
        return event.sequence_number
    return msgspec.json.decode(_FIELDS.decode(event.raw)["sequence_number"], type=int)


def replace_ids(item: Any, item_id: str | None, call_id: str | None = None) -> Any:
    """Return the item with another id and call id. An argument that is None leaves its field unchanged."""
    ids = {name: value for name, value in (("id", item_id), ("call_id", call_id)) if value is not None}
    if not isinstance(item, Unknown):
        return msgspec.structs.replace(item, **ids)
    fields = _FIELDS.decode(item.raw)
    fields |= {name: _encode(value) for name, value in ids.items()}
    return Unknown(msgspec.json.encode(fields))


def get_call_id(item: OutputItem | Unknown) -> str | None:
    """Return the call id of a tool call or of a call's output, or None for an item without one."""
    if not isinstance(item, Unknown):
        return getattr(item, "call_id", None) if "call_id" in item.__struct_fields__ else None
    if not item.type.endswith(("_call", "_output")):
        return None
    raw = _FIELDS.decode(item.raw).get("call_id")
    call_id = None if raw is None else msgspec.json.decode(raw)
    return call_id if isinstance(call_id, str) else None


def merge_fields(item: OutputItem | Unknown, fields: dict[str, Raw]) -> Any:
    """Return the item with these fields set, as a known type if the result is valid as one."""
    merged = _FIELDS.decode(codec.encode(item)) | fields
    return decode_output_item(msgspec.json.encode(merged))


def decode_output_item(raw: bytes) -> OutputItem | Unknown:
    """Decode an upstream's output item without losing data. `Unknown` keeps every other object byte for byte."""
    try:
        item = ITEMS.decode_lossless(raw)
    except (msgspec.ValidationError, RecursionError):  # without a type, or nested too deeply
        return Unknown(raw)
    return Unknown(raw) if isinstance(item, _INPUT_ONLY_TYPES) else item


def get_id_prefix(item: OutputItem | Unknown) -> str:
    """Return the prefix of the item's id, or the default prefix if the id has none."""
    prefix, _, rest = (item.id or "").partition("_")
    return prefix if rest and prefix.isalnum() else PassthroughDraft.prefix


def _encode(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def _is_ongoing(raw: Raw | None) -> bool:
    status = None if raw is None else msgspec.json.decode(raw)
    return isinstance(status, str) and status in _ONGOING_STATUSES
