"""Closed output items, and the end of the items of a response that failed."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import msgspec

from antiphon.protocol.events import Event, OutputItemDone
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown
from antiphon.stream.drafts import CallDraft, Ending, MessageDraft, ReasoningDraft
from antiphon.stream.passthrough import PassthroughDraft, merge_fields

OpenDraft: TypeAlias = MessageDraft | ReasoningDraft | CallDraft | PassthroughDraft


class ClosedItem(NamedTuple):
    """An output item that is done, and the events of its end up to `output_item.done`."""

    item: Item | Unknown
    ending: tuple[Event, ...]


def make_call_id(item_id: str) -> str:
    """Return a call id for a call that has none from its backend."""
    return f"call_{item_id.partition('_')[2]}"


def choose_ending(draft: OpenDraft, ending: Ending, *, is_last: bool) -> Ending:
    """Return the ending of an open item when its response ends.

    `ending` applies to the last item, to passthrough items and to calls with incomplete JSON. Other items were followed
    by a later one, so they are complete.
    """
    is_cut = is_last or isinstance(draft, PassthroughDraft) or (isinstance(draft, CallDraft) and not draft.is_whole())
    return ending if is_cut else "completed"


def close_draft(draft: OpenDraft, ending: Ending) -> ClosedItem:
    emitted, item = draft.close(ending)
    if draft.amendments:
        item = merge_fields(item, draft.amendments)
        cast(OutputItemDone, emitted[-1]).item = item
    return ClosedItem(item, tuple(emitted))


def salvage_items(output: Sequence[OpenDraft | ClosedItem], number: int) -> tuple[list[Event], list[ClosedItem]]:
    """Close all announced items after a failure. Return the events that are still to be sent, and the closed items.

    `number` is the first sequence number that was not sent. The end of a closed item is emitted again if it has this
    number or a later one. An item is dropped if its `output_item.added` was not sent. Never raises.
    """
    emitted: list[Event] = []
    done: list[ClosedItem] = []
    for entry in output:
        if isinstance(entry, ClosedItem):
            closed = entry
        elif entry.announced is None or entry.announced.sequence_number >= number:
            continue
        else:
            closed = _close_draft_or_announced(entry)
        done.append(closed)
        if closed is not entry or closed.ending[-1].sequence_number >= number:
            emitted += closed.ending
    for offset, event in enumerate(emitted):
        event.sequence_number = number + offset
    return emitted, done


def _close_draft_or_announced(draft: OpenDraft) -> ClosedItem:
    try:
        return close_draft(draft, "incomplete")
    except Exception:  # its deltas make no valid item: close it as it was announced
        assert draft.announced is not None
        item = draft.announced.item
        if not isinstance(item, Unknown) and hasattr(item, "status"):
            item = msgspec.structs.replace(item, status="incomplete")
        return ClosedItem(item, (OutputItemDone(0, draft.output_index, item),))
