"""Pairing of tool calls with their outputs: an output without its call, or a call without its output, is refused."""

from collections.abc import Sequence

from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, PAIRED_TYPES
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown


def check_call_pairs(items: Sequence[Item | Unknown]) -> None:
    """Raise InvalidRequest unless every output follows its call and every call has one output.

    An incomplete call needs no output. A server-side tool search has no call id and is not paired.
    """
    unanswered: dict[str, str] = {}
    incomplete: set[str] = set()
    answered: set[str] = set()
    for item in (item for item in items if type(item) in PAIRED_TYPES):
        if isinstance(item, CALL_TYPES):
            if item.call_id is not None:
                if item.call_id in unanswered:
                    raise InvalidRequest(f"More than one {_noun(item)} with call_id {item.call_id}.", param="input")
                if item.status == "incomplete":
                    incomplete.add(item.call_id)
                else:
                    unanswered[item.call_id] = _noun(item)
        elif isinstance(item, OUTPUT_TYPES) and item.call_id is not None:
            if unanswered.pop(item.call_id, None) is None and item.call_id not in incomplete:
                found = "More than one output" if item.call_id in answered else "No tool call"
                raise InvalidRequest(f"{found} found for {_noun(item)} with call_id {item.call_id}.", param="input")
            incomplete.discard(item.call_id)
            answered.add(item.call_id)
    for call_id, noun in unanswered.items():
        raise InvalidRequest(f"No tool output found for {noun} {call_id}.", param="input")


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
