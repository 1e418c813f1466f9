"""How an item that is under way comes to its end: as it should, or, after something broke, as it can."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import msgspec

from antiphon.protocol.events import Event, OutputItemDone
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.stream.carried import CarriedDraft, amend
from antiphon.stream.drafts import CallDraft, Ending, MessageDraft, ReasoningDraft

OpenDraft: TypeAlias = MessageDraft | ReasoningDraft | CallDraft | CarriedDraft


class Closed(NamedTuple):
    """An item that is whole, and the events that say so, from the first that came of its end to its last of all."""

    item: Item | Unknown
    ending: tuple[Event, ...]


def close(draft: OpenDraft, ending: Ending) -> Closed:
    told, item = draft.close(ending)
    if draft.amendments:
        item = amend(item, draft.amendments)
        cast(OutputItemDone, told[-1]).item = item
    return Closed(item, tuple(told))


def salvage(output: Sequence[OpenDraft | Closed], number: int) -> tuple[list[Event], list[Closed]]:
    """What is still to be told so that these items are done, and those that then are. It does not raise.

    `number` is that of the first event that nobody was told: an end that has it or a later one is told again, and an
    item that was to be announced by then never was.
    """
    told: list[Event] = []
    done: list[Closed] = []
    for entry in output:
        if isinstance(entry, Closed):
            closed = entry
        elif entry.announced is None or entry.announced.sequence_number >= number:
            continue
        else:
            closed = _close_somehow(entry)
        done.append(closed)
        if closed is not entry or closed.ending[-1].sequence_number >= number:
            told += closed.ending
    for place, event in enumerate(told):
        event.sequence_number = number + place
    return told, done


def _close_somehow(draft: OpenDraft) -> Closed:
    try:
        return close(draft, "incomplete")
    except Exception:  # what was said of it makes no whole: it ends as it was announced
        assert draft.announced is not None
        item = draft.announced.item
        if not isinstance(item, Unknown) and hasattr(item, "status"):
            item = msgspec.structs.replace(item, status="incomplete")
        return Closed(item, (OutputItemDone(0, draft.output_index, item),))
