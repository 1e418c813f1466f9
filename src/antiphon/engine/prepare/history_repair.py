"""Repair of stored histories: make damaged items readable for a model.

New input is checked strictly (`call_pairs.py`). Stored items can still be damaged: an item was deleted from a
conversation, or a turn was cut off. Models and upstream APIs refuse such a history every time, so it is repaired before
each turn. Every repair is reported as a warning.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence

import msgspec

from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, PAIRED_TYPES, get_comparable_text
from antiphon.protocol import codec
from antiphon.protocol.content import InputText, OutputText, Text
from antiphon.protocol.hosted import ToolSearchCall, ToolSearchOutput
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
from antiphon.store.base import parse_response_id

_TEXT_TYPES = (InputText, OutputText, Text)
_REPAIRED_TYPES = PAIRED_TYPES | {Reasoning}
_SEARCH_TYPES = frozenset({ToolSearchCall, ToolSearchOutput})


class RepairedHistory(msgspec.Struct, frozen=True):
    """The repaired items, and a description of each repair."""

    items: list[Item | Unknown]
    repairs: list[str]


def repair_history(
    items: Sequence[Item | Unknown], *, answered_next: Collection[str] = (), last_response: str | None = None
) -> RepairedHistory:
    """Drop duplicates, lone outputs and unfinished items, and add an output to calls that have none.

    Calls at the very end, those of the response with the id `last_response`, and those in `answered_next` get no
    output: their outputs are still to come.
    """
    if _REPAIRED_TYPES.isdisjoint(map(type, items)) and _have_unique_ids(items):  # the common case
        return RepairedHistory(list(items), [])
    searched, repairs = _drop_lone_searches(items)
    repaired = _drop_faulty_items(searched, answered_next, repairs)
    repaired = _answer_unanswered_calls(repaired, answered_next, last_response, repairs)
    repaired, dropped = _drop_dangling_reasoning(repaired)
    return RepairedHistory(repaired, [*repairs, *dropped])


def drop_unfinished_items(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Drop calls that were cut off and have no output, lone tool searches, and reasoning that nothing follows.

    Upstreams refuse such items, but a client whose stream was cut off can send no others.
    """
    items, lone = _drop_lone_searches(items)
    rest, repairs = _drop_cut_off_items(items)
    return rest, [*lone, *repairs]


def _drop_cut_off_items(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    if not any(_is_cut_off(item) for item in items if type(item) in PAIRED_TYPES):
        return _drop_dangling_reasoning(items)
    answered = _trace_calls(items).answered
    cut_off = {index for index, item in enumerate(items) if _is_cut_off(item) and index not in answered}
    rest, repairs = _drop_dangling_reasoning([item for index, item in enumerate(items) if index not in cut_off])
    return rest, [*(_describe_cut_off(items[index]) for index in sorted(cut_off)), *repairs]


def find_unanswered_calls(items: Sequence[Item | Unknown]) -> dict[int, str]:
    """Return the index and the call id of each call whose output may still come."""
    return _trace_calls(items).unanswered


class _CallTrace(msgspec.Struct, frozen=True):
    """Indexes of calls: those with an output, those replaced by a later call with the same id, and the others."""

    answered: set[int]
    replaced: set[int]
    unanswered: dict[int, str]


def _trace_calls(items: Sequence[Item | Unknown]) -> _CallTrace:
    waiting: dict[str, int] = {}
    answered: set[int] = set()
    replaced: set[int] = set()
    for index, item in enumerate(items):
        if type(item) not in PAIRED_TYPES:
            continue
        if isinstance(item, CALL_TYPES):
            if item.call_id is not None:
                if item.call_id in waiting:
                    replaced.add(waiting[item.call_id])
                waiting[item.call_id] = index
        elif isinstance(item, OUTPUT_TYPES) and item.call_id in waiting:
            answered.add(waiting.pop(item.call_id))
    return _CallTrace(answered, replaced, {index: call_id for call_id, index in waiting.items()})


# Tool searches that a server runs: they have no call id


def _drop_lone_searches(items: Sequence[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Drop searches without an output, and outputs without a search. An output belongs to the last open search."""
    if _SEARCH_TYPES.isdisjoint(map(type, items)):
        return list(items), []
    searches = [
        (index, item)
        for index, item in enumerate(items)
        if isinstance(item, ToolSearchCall | ToolSearchOutput) and item.call_id is None
    ]
    open_searches: list[int] = []
    lone: dict[int, str] = {}
    for index, item in searches:
        if isinstance(item, ToolSearchCall):
            open_searches.append(index)
        elif not open_searches or _is_cut_off(items[open_searches[-1]]):
            lone[index] = f"the output {item.id} without its tool search was left out"
        else:
            open_searches.pop()
    lone |= {index: f"the tool search {items[index].id} had no output and was left out" for index in open_searches}
    return [item for index, item in enumerate(items) if index not in lone], [lone[index] for index in sorted(lone)]


# Duplicates and outputs without a call


def _drop_faulty_items(
    items: Sequence[Item | Unknown], answered_next: Collection[str], repairs: list[str]
) -> list[Item | Unknown]:
    """Drop duplicates and outputs without a call.

    Two different calls may have one call id, because some models number their calls anew in each turn.
    """
    trace = _trace_calls(items)
    answered = trace.answered | {index for index, call_id in trace.unanswered.items() if call_id in answered_next}
    seen = _SeenItems()
    waiting: dict[str, Item] = {}
    rest: list[Item | Unknown] = []
    for index, item in enumerate(items):
        if type(item) in PAIRED_TYPES:
            fault = _find_call_fault(item, seen, waiting, is_answered=index in answered)
        else:
            fault = seen.find_repetition(item)
        if fault is None:
            rest.append(item)
        else:
            repairs.append(fault)
    return rest


def _find_call_fault(
    item: Item | Unknown, seen: "_SeenItems", waiting: dict[str, Item], *, is_answered: bool
) -> str | None:
    """Return the reason to drop a call or an output. Record others in `seen` or in `waiting` (calls without output)."""
    if isinstance(item, CALL_TYPES):
        # The output belongs to the complete call with this id, if there is one.
        if _is_cut_off(item) and (not is_answered or item.call_id in waiting):
            return _describe_cut_off(item)
        if item.call_id is not None:
            if item.id is not None and waiting.get(item.call_id) == item:
                return f"a second {item.type} {item.call_id} was left out"
            waiting[item.call_id] = item
            return None
    elif isinstance(item, OUTPUT_TYPES) and item.call_id is not None:
        has_no_call = waiting.pop(item.call_id, None) is None
        return f"an output without its call {item.call_id} was left out" if has_no_call else None
    return seen.find_repetition(item)


def _have_unique_ids(items: Sequence[Item | Unknown]) -> bool:
    """Return True if no two items have the same id. Items without an id do not count."""
    ids = [item.id for item in items]
    found = set(ids)
    return len(found) == len(ids) or (None in found and len(found) - 1 == len(ids) - ids.count(None))


class _SeenItems:
    """The items so far that are not calls or outputs, by id. Contents are read only if an id occurs twice."""

    def __init__(self) -> None:
        self._first: dict[str, Item | Unknown] = {}
        self._contents: dict[str, set[Hashable]] = {}

    def find_repetition(self, item: Item | Unknown) -> str | None:
        """Return the reason to drop an item that repeats another. Equal ids are not enough: some clients reuse them."""
        item_id = item.id
        if item_id is None:
            return None
        if item_id not in self._first:
            self._first[item_id] = item
            return None
        contents = self._contents.get(item_id)
        if contents is None:
            contents = self._contents[item_id] = {_read_content(self._first[item_id])}
        if (content := _read_content(item)) in contents:
            return f"a second {item.type} {item_id} was left out"
        contents.add(content)
        return None


def _read_content(item: Item | Unknown) -> Hashable:
    is_text = isinstance(item, Message) and _has_only_text(item)
    return get_comparable_text(item) if is_text else codec.encode(item)


def _has_only_text(item: Message) -> bool:
    return isinstance(item.content, str) or all(isinstance(part, _TEXT_TYPES) for part in item.content)


# Calls without an output


def _answer_unanswered_calls(
    items: list[Item | Unknown], answered_next: Collection[str], last_response: str | None, repairs: list[str]
) -> list[Item | Unknown]:
    trace = _trace_calls(items)
    if not trace.unanswered and not trace.replaced:
        return items
    pending = _find_pending_calls(items, trace.unanswered, answered_next, last_response)
    lost = (trace.unanswered.keys() - pending) | trace.replaced
    repaired: list[Item | Unknown] = []
    for index, item in enumerate(items):
        if index not in lost:
            repaired.append(item)
        elif isinstance(item, FunctionCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            repaired += [item, FunctionCallOutput(LOST_OUTPUT, item.call_id, status="completed")]
        elif isinstance(item, CustomToolCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            repaired += [item, CustomToolCallOutput(item.call_id, LOST_OUTPUT, status="completed")]
        elif isinstance(item, CALL_TYPES):
            repairs.append(f"the call {item.call_id} had no output and was left out")
    return repaired


def _find_pending_calls(
    items: Sequence[Item | Unknown],
    unanswered: Mapping[int, str],
    answered_next: Collection[str],
    last_response: str | None,
) -> set[int]:
    """Return the indexes of the calls whose outputs are still to come."""
    last_calls = _find_last_calls(items)
    # Several clients may use one conversation. A client that answers one response's calls does not know the others.
    answered = {_find_response(items[index]) for index, call_id in unanswered.items() if call_id in answered_next}
    pending: set[int] = set()
    for index, call_id in unanswered.items():
        response = _find_response(items[index])
        # Text, or calls of hosted tools, may follow a call in its response.
        is_recent = index >= last_calls or (response is not None and response == last_response)
        if call_id in answered_next or (is_recent and (not answered or response in answered)):
            pending.add(index)
    return pending


def _find_response(item: Item | Unknown) -> str | None:
    """Return the id of the response that an item is the output of."""
    return parse_response_id(item.id) if item.id is not None else None


def _find_last_calls(items: Sequence[Item | Unknown]) -> int:
    """Return the index after which there are only calls and outputs."""
    end = len(items)
    while end > 0 and isinstance(items[end - 1], CALL_TYPES + OUTPUT_TYPES):
        end -= 1
    return end


# Unfinished items


def _is_cut_off(item: Item | Unknown) -> bool:
    # The status first: this runs for every call and output, and `isinstance` is slower.
    return getattr(item, "status", None) == "incomplete" and isinstance(item, CALL_TYPES)


def _describe_cut_off(call: Item | Unknown) -> str:
    assert isinstance(call, CALL_TYPES)
    return f"the call {call.call_id} was cut off and left out"


def _drop_dangling_reasoning(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    if Reasoning not in map(type, items):
        return items, []
    repairs: list[str] = []
    rest: list[Item | Unknown] = []
    for item in reversed(items):
        if isinstance(item, Reasoning) and (not rest or not _may_follow_reasoning(rest[-1])):
            repairs.append(f"the reasoning {item.id} led to nothing and was left out")
        else:
            rest.append(item)
    rest.reverse()
    return rest, repairs


def _may_follow_reasoning(item: Item | Unknown) -> bool:
    return not isinstance(item, OUTPUT_TYPES) and not (isinstance(item, Message) and item.role != "assistant")
