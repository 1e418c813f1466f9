"""Mending stored history, so that one bad turn cannot brick a conversation.

What a client sends is checked strictly (`history.py`). What was stored can still be damaged: an item deleted from a
conversation, a turn that was cut off. Models and upstream APIs refuse such a history for ever, so it is mended on the
way out, and every repair is told.
"""

from collections.abc import Collection, Sequence

import msgspec

from antiphon.engine.history import CALLS, OUTPUTS
from antiphon.protocol.items import (
    LOST_OUTPUT,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.open import Unknown
from antiphon.store.ownership import find_owner


class Repaired(msgspec.Struct, frozen=True):
    items: list[Item | Unknown]
    repairs: list[str]


def repair(items: Sequence[Item | Unknown], *, answered_next: Collection[str] = ()) -> Repaired:
    """The history a model can read.

    Calls at the very end are left open, and so are those named in `answered_next`: their outputs are about to come.
    """
    repairs: list[str] = []
    kept = _pair(items, repairs)
    kept = _answer_lone_calls(kept, answered_next, repairs)
    kept, dropped = drop_lone_reasoning(kept)
    return Repaired(kept, [*repairs, *dropped])


def _pair(items: Sequence[Item | Unknown], repairs: list[str]) -> list[Item | Unknown]:
    """Without what comes twice, and without outputs that answer no call.

    A call's id may come again for another call, once the first has been answered: some models count them anew.
    """
    answers = {item.call_id for item in items if isinstance(item, OUTPUTS)}
    seen: set[str] = set()
    waiting: set[str] = set()
    kept: list[Item | Unknown] = []
    for item in items:
        fault = _find_fault(item, seen, waiting, answers)
        if fault is not None:
            repairs.append(fault)
            continue
        kept.append(item)
        if item.id is not None:
            seen.add(item.id)
        if isinstance(item, CALLS):
            if item.call_id is not None:
                waiting.add(item.call_id)
        elif isinstance(item, OUTPUTS) and item.call_id is not None:
            waiting.discard(item.call_id)
    return kept


def _find_fault(
    item: Item | Unknown, seen: Collection[str], waiting: Collection[str], answers: Collection[str | None]
) -> str | None:
    if item.id is not None and item.id in seen:
        return f"a second {item.type} {item.id} was left out"
    if isinstance(item, CALLS):
        if item.call_id in waiting:
            return f"a second {item.type} {item.call_id} was left out"
        if item.status == "incomplete" and item.call_id not in answers:
            return f"the call {item.call_id} was cut off and left out"
    elif isinstance(item, OUTPUTS) and item.call_id is not None and item.call_id not in waiting:
        return f"an output without its call {item.call_id} was left out"
    return None


def _answer_lone_calls(
    items: Sequence[Item | Unknown], answered_next: Collection[str], repairs: list[str]
) -> list[Item | Unknown]:
    lone = find_lone_calls(items)
    open_end = _find_open_end(items)
    # Several may use a conversation at once. Whoever answers the calls of one response does not know those of another.
    answered = {_find_maker(items[index]) for index, call_id in lone.items() if call_id in answered_next}
    kept: list[Item | Unknown] = []
    for index, item in enumerate(items):
        is_owed = index >= open_end and (not answered or _find_maker(item) in answered)
        if index not in lone or is_owed or lone[index] in answered_next:
            kept.append(item)
        elif isinstance(item, FunctionCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, FunctionCallOutput(LOST_OUTPUT, item.call_id, status="completed")]
        elif isinstance(item, CustomToolCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, CustomToolCallOutput(item.call_id, LOST_OUTPUT, status="completed")]
        else:
            repairs.append(f"the call {lone[index]} had no output and was left out")
    return kept


def find_lone_calls(items: Sequence[Item | Unknown]) -> dict[int, str]:
    """Where the calls stand that no output follows, and their ids."""
    waiting: dict[str, int] = {}
    for index, item in enumerate(items):
        if isinstance(item, CALLS):
            if item.call_id is not None:
                waiting[item.call_id] = index
        elif isinstance(item, OUTPUTS) and item.call_id is not None:
            waiting.pop(item.call_id, None)
    return {index: call_id for call_id, index in waiting.items()}


def _find_maker(item: Item | Unknown) -> str | None:
    """The response that made an item, if it was one of ours."""
    return find_owner(item.id) if item.id is not None else None


def _find_open_end(items: Sequence[Item | Unknown]) -> int:
    """Where the last turn's calls begin: after them there is nothing but calls and outputs."""
    end = len(items)
    while end > 0 and isinstance(items[end - 1], CALLS + OUTPUTS):
        end -= 1
    return end


def drop_lone_reasoning(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Reasoning leads to an answer or a call. Before the user's next word, or at the end, it led nowhere.

    Upstreams refuse such a history, and a client that was cut off while its model reasoned has no other.
    """
    if Reasoning not in map(type, items):
        return items, []
    repairs: list[str] = []
    kept: list[Item | Unknown] = []
    for item in reversed(items):
        if isinstance(item, Reasoning) and (not kept or not _follows_reasoning(kept[-1])):
            repairs.append(f"the reasoning {item.id} led to nothing and was left out")
        else:
            kept.append(item)
    kept.reverse()
    return kept, repairs


def _follows_reasoning(item: Item | Unknown) -> bool:
    return not isinstance(item, OUTPUTS) and not (isinstance(item, Message) and item.role != "assistant")
