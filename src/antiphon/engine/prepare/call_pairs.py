"""Pairing of tool calls with their outputs: an output without its call, or a call without its output, is refused."""

from collections.abc import Sequence
from typing import Any

from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, PAIRED_TYPES
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown

# For `type(item) in _CALLS`: `isinstance` with a tuple of structs tests one after the other, which is slow.
_CALLS = frozenset(CALL_TYPES)


def check_call_pairs(items: Sequence[Item | Unknown]) -> bool:
    """Raise InvalidRequest unless every output follows its call and every call has one output.

    Return True if a call is incomplete. Such a call needs no output. A server-side tool search has no call id and is
    not paired.
    """
    unanswered: dict[str, Item] = {}
    incomplete: set[str] = set()
    answered: set[str] = set()
    has_incomplete = False
    paired: list[Any] = [item for item in items if type(item) in PAIRED_TYPES]
    for item in paired:
        call_id = item.call_id
        if call_id is None:
            continue
        if type(item) in _CALLS:
            if call_id in unanswered:
                raise InvalidRequest(f"More than one {_noun(item)} with call_id {call_id}.", param="input")
            if item.status == "incomplete":
                incomplete.add(call_id)
                has_incomplete = True
            else:
                unanswered[call_id] = item
        else:
            if unanswered.pop(call_id, None) is None and call_id not in incomplete:
                found = "More than one output" if call_id in answered else "No tool call"
                raise InvalidRequest(f"{found} found for {_noun(item)} with call_id {call_id}.", param="input")
            incomplete.discard(call_id)
            answered.add(call_id)
    for call_id, call in unanswered.items():
        raise InvalidRequest(f"No tool output found for {_noun(call)} {call_id}.", param="input")
    return has_incomplete


def find_answered_calls(items: Sequence[Item | Unknown]) -> set[str]:
    """Return the ids of calls made before these items that these items answer.

    An output answers the latest call with its id.
    """
    called: set[str] = set()
    answered: set[str] = set()
    for item in (item for item in items if type(item) in PAIRED_TYPES):
        if isinstance(item, CALL_TYPES):
            if item.call_id is not None:
                called.add(item.call_id)
        elif isinstance(item, OUTPUT_TYPES) and item.call_id is not None and item.call_id not in called:
            answered.add(item.call_id)
    return answered


def _noun(item: Item) -> str:
    return item.type.replace("_", " ")
