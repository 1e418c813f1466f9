"""Mending stored history, so that one bad turn cannot brick a conversation.

What a client sends is checked strictly (`history.py`). What was stored can still be damaged: an item deleted from a
conversation, a turn that was cut off. Models and upstream APIs refuse such a history for ever, so it is mended on the
way out, and every repair is told.
"""

from collections.abc import Iterable, Sequence

import msgspec

from antiphon.engine.history import CALLS, OUTPUTS
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.open import Unknown

LOST_OUTPUT = "No output was recorded for this call. Whether it was carried out is not known."


class Repaired(msgspec.Struct, frozen=True):
    items: list[Item | Unknown]
    repairs: list[str]


def repair(items: Sequence[Item | Unknown]) -> Repaired:
    """The history a model can read. Calls at the very end are left open: their outputs are about to come."""
    repairs: list[str] = []
    kept = _drop_cut_calls(items)
    kept = _drop_repeats(kept, repairs)
    kept = _drop_lone_outputs(kept, repairs)
    kept = _answer_lone_calls(kept, repairs)
    kept = _drop_lone_reasoning(kept, repairs)
    return Repaired(kept, repairs)


def _drop_cut_calls(items: Iterable[Item | Unknown]) -> list[Item | Unknown]:
    """Half a call, cut off by the token limit or a failure, says nothing and can be answered by nobody."""
    return [item for item in items if not (isinstance(item, CALLS) and item.status == "incomplete")]


def _drop_repeats(items: Iterable[Item | Unknown], repairs: list[str]) -> list[Item | Unknown]:
    seen: set[tuple[str, str]] = set()
    kept: list[Item | Unknown] = []
    for item in items:
        identity = _identify(item)
        if identity is not None and identity in seen:
            repairs.append(f"a second {item.type} {identity[1]} was left out")
            continue
        if identity is not None:
            seen.add(identity)
        kept.append(item)
    return kept


def _identify(item: Item | Unknown) -> tuple[str, str] | None:
    if isinstance(item, CALLS):
        return "call", item.call_id
    if isinstance(item, OUTPUTS):
        return ("output", item.call_id) if item.call_id is not None else None
    return ("id", item.id) if item.id is not None else None


def _drop_lone_outputs(items: Iterable[Item | Unknown], repairs: list[str]) -> list[Item | Unknown]:
    called: set[str] = set()
    kept: list[Item | Unknown] = []
    for item in items:
        if isinstance(item, CALLS):
            called.add(item.call_id)
        elif isinstance(item, OUTPUTS) and item.call_id is not None and item.call_id not in called:
            repairs.append(f"the output of the unknown call {item.call_id} was left out")
            continue
        kept.append(item)
    return kept


def _answer_lone_calls(items: Sequence[Item | Unknown], repairs: list[str]) -> list[Item | Unknown]:
    answered = {item.call_id for item in items if isinstance(item, OUTPUTS)}
    open_end = _find_open_end(items)
    kept: list[Item | Unknown] = []
    for index, item in enumerate(items):
        if not isinstance(item, CALLS) or item.call_id in answered or index >= open_end:
            kept.append(item)
        elif isinstance(item, FunctionCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, FunctionCallOutput(LOST_OUTPUT, item.call_id, status="completed")]
        elif isinstance(item, CustomToolCall):
            repairs.append(f"the call {item.call_id} had no output and got a note instead")
            kept += [item, CustomToolCallOutput(item.call_id, LOST_OUTPUT, status="completed")]
        else:
            repairs.append(f"the call {item.call_id} had no output and was left out")
    return kept


def _find_open_end(items: Sequence[Item | Unknown]) -> int:
    """Where the last turn's calls begin: after them there is nothing but calls and outputs."""
    end = len(items)
    while end > 0 and isinstance(items[end - 1], CALLS + OUTPUTS):
        end -= 1
    return end


def _drop_lone_reasoning(items: Sequence[Item | Unknown], repairs: list[str]) -> list[Item | Unknown]:
    """Reasoning leads to an answer or a call. Before the user's next word, or at the end, it led nowhere."""
    kept: list[Item | Unknown] = []
    for item in reversed(items):
        if isinstance(item, Reasoning) and (not kept or not _follows_reasoning(kept[-1])):
            repairs.append(f"the reasoning {item.id} led to nothing and was left out")
        else:
            kept.append(item)
    kept.reverse()
    return kept


def _follows_reasoning(item: Item | Unknown) -> bool:
    return not isinstance(item, OUTPUTS) and not (isinstance(item, Message) and item.role != "assistant")
