"""Mending stored history, so that one bad turn cannot brick a conversation.

What a client sends is checked strictly (`history.py`). What was stored can still be damaged: an item deleted from a
conversation, a turn that was cut off. Models and upstream APIs refuse such a history for ever, so it is mended on the
way out, and every repair is told.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import TypeAlias

import msgspec

from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, get_comparable_text
from antiphon.protocol import codec
from antiphon.protocol.content import InputText, OutputText, Text
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
from antiphon.protocol.unions import Unknown
from antiphon.store.ownership import find_owner

_TEXTS = (InputText, OutputText, Text)
# By id, the first item that has it, and what all that have it say, once there is a second.
_Seen: TypeAlias = dict[str, tuple[Item | Unknown, set[Hashable]]]


class RepairedHistory(msgspec.Struct, frozen=True):
    items: list[Item | Unknown]
    repairs: list[str]


def repair_history(items: Sequence[Item | Unknown], *, answered_next: Collection[str] = ()) -> RepairedHistory:
    """The history a model can read.

    Calls at the very end are left open, and so are those named in `answered_next`: their outputs are about to come.
    """
    repairs: list[str] = []
    kept = _pair(items, answered_next, repairs)
    kept = _answer_lone_calls(kept, answered_next, repairs)
    kept, dropped = _drop_reasoning(kept)
    return RepairedHistory(kept, [*repairs, *dropped])


def _pair(items: Sequence[Item | Unknown], answered_next: Collection[str], repairs: list[str]) -> list[Item | Unknown]:
    """Without what comes twice, and without outputs that answer no call.

    A call's id may come again for another call: some models count them anew.
    """
    trace = _trace_calls(items)
    answered = trace.answered | {index for index, call_id in trace.lone.items() if call_id in answered_next}
    seen: _Seen = {}
    waiting: dict[str, Item] = {}
    kept: list[Item | Unknown] = []
    for index, item in enumerate(items):
        fault = _find_fault(item, seen, waiting, is_answered=index in answered)
        if fault is None:
            kept.append(item)
        else:
            repairs.append(fault)
    return kept


def _find_fault(item: Item | Unknown, seen: _Seen, waiting: dict[str, Item], *, is_answered: bool) -> str | None:
    """Why an item is left out; one that is kept is noted in `seen` or among the calls that are `waiting`."""
    if isinstance(item, CALL_TYPES):
        # Where there is a whole one under its id, that is the one which is answered.
        if _is_cut(item) and (not is_answered or item.call_id in waiting):
            return _tell_cut(item)
        if item.call_id is not None:
            if item.id is not None and waiting.get(item.call_id) == item:
                return f"a second {item.type} {item.call_id} was left out"
            waiting[item.call_id] = item
            return None
    elif isinstance(item, OUTPUT_TYPES) and item.call_id is not None:
        is_lone = waiting.pop(item.call_id, None) is None
        return f"an output without its call {item.call_id} was left out" if is_lone else None
    return _find_repetition(item, seen)


def _find_repetition(item: Item | Unknown, seen: _Seen) -> str | None:
    """An id says little: some clients give the same to all that they send."""
    if item.id is None:
        return None
    if item.id not in seen:
        seen[item.id] = (item, set())
        return None
    first, told = seen[item.id]
    if not told:  # until now there was nothing to compare
        told.add(_read_whole(first))
    if (whole := _read_whole(item)) in told:
        return f"a second {item.type} {item.id} was left out"
    told.add(whole)
    return None


def _read_whole(item: Item | Unknown) -> Hashable:
    """All that would be lost with an item."""
    return get_comparable_text(item) if isinstance(item, Message) and _is_text(item) else codec.encode(item)


def _is_text(item: Message) -> bool:
    return isinstance(item.content, str) or all(isinstance(part, _TEXTS) for part in item.content)


def _answer_lone_calls(
    items: Sequence[Item | Unknown], answered_next: Collection[str], repairs: list[str]
) -> list[Item | Unknown]:
    trace = _trace_calls(items)
    lone = trace.lone
    open_end = _find_open_end(items)
    # Several may use a conversation at once. Whoever answers the calls of one response does not know those of another.
    answered = {_find_maker(items[index]) for index, call_id in lone.items() if call_id in answered_next}
    kept: list[Item | Unknown] = []
    for index, item in enumerate(items):
        is_owed = index >= open_end and (not answered or _find_maker(item) in answered)
        awaits = index in lone and (is_owed or lone[index] in answered_next)
        if awaits or (index not in lone and index not in trace.replaced):
            kept.append(item)
        elif isinstance(item, FunctionCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, FunctionCallOutput(LOST_OUTPUT, item.call_id, status="completed")]
        elif isinstance(item, CustomToolCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, CustomToolCallOutput(item.call_id, LOST_OUTPUT, status="completed")]
        elif isinstance(item, CALL_TYPES):
            repairs.append(f"the call {item.call_id} had no output and was left out")
    return kept


class _Trace(msgspec.Struct, frozen=True):
    """Where the calls stand: those with an output, those that another call with their id came after, and the rest."""

    answered: set[int]
    replaced: set[int]
    lone: dict[int, str]


def _trace_calls(items: Sequence[Item | Unknown]) -> _Trace:
    waiting: dict[str, int] = {}
    answered: set[int] = set()
    replaced: set[int] = set()
    for index, item in enumerate(items):
        if isinstance(item, CALL_TYPES):
            if item.call_id is not None:
                if item.call_id in waiting:
                    replaced.add(waiting[item.call_id])
                waiting[item.call_id] = index
        elif isinstance(item, OUTPUT_TYPES) and item.call_id in waiting:
            answered.add(waiting.pop(item.call_id))
    return _Trace(answered, replaced, {index: call_id for call_id, index in waiting.items()})


def find_unanswered_calls(items: Sequence[Item | Unknown]) -> dict[int, str]:
    """Where the calls stand whose outputs may still come, and their ids."""
    return _trace_calls(items).lone


def _find_maker(item: Item | Unknown) -> str | None:
    """The response that made an item, if it was one of ours."""
    return find_owner(item.id) if item.id is not None else None


def _find_open_end(items: Sequence[Item | Unknown]) -> int:
    """Where the last turn's calls begin: after them there is nothing but calls and outputs."""
    end = len(items)
    while end > 0 and isinstance(items[end - 1], CALL_TYPES + OUTPUT_TYPES):
        end -= 1
    return end


def drop_unfinished_items(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Reasoning leads to an answer or a call. Before the user's next word, or at the end, it led nowhere; and so it
    did before a call that was cut off, which goes with it, unless it was answered nevertheless.

    Upstreams refuse such a history, and a client that was cut off while its model reasoned has no other.
    """
    if not any(map(_is_cut, items)):
        return _drop_reasoning(items)
    answered = _trace_calls(items).answered
    cut = {index for index, item in enumerate(items) if _is_cut(item) and index not in answered}
    kept, repairs = _drop_reasoning([item for index, item in enumerate(items) if index not in cut])
    return kept, [*(_tell_cut(items[index]) for index in sorted(cut)), *repairs]


def _is_cut(item: Item | Unknown) -> bool:
    # In this order: every item is asked, and for its kind it takes much longer.
    return getattr(item, "status", None) == "incomplete" and isinstance(item, CALL_TYPES)


def _tell_cut(call: Item | Unknown) -> str:
    assert isinstance(call, CALL_TYPES)
    return f"the call {call.call_id} was cut off and left out"


def _drop_reasoning(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
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
    return not isinstance(item, OUTPUT_TYPES) and not (isinstance(item, Message) and item.role != "assistant")
