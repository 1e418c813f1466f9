"""Calls of the history that a client sends again without their ids."""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence

import msgspec

from antiphon.engine.items import CALL_TYPES, OUTPUT_TYPES, PAIRED_TYPES, get_comparable_text
from antiphon.protocol.items import CustomToolCall, FunctionCall, Item
from antiphon.protocol.unions import Unknown


class _Call(msgspec.Struct):
    """A call with its index, and its output if there is one."""

    index: int
    item: Item | Unknown
    output: Item | Unknown | None = None

    def make_key(self) -> Hashable:
        """Return a key that is equal for the same call, in other JSON too."""
        call = self.item
        if isinstance(call, FunctionCall):
            return FunctionCall, call.name, _normalize_json(call.arguments)
        if isinstance(call, CustomToolCall):
            return CustomToolCall, call.name, call.input
        return type(call), get_comparable_text(call)

    def read_output(self) -> tuple[str, ...] | None:
        return None if self.output is None else get_comparable_text(self.output)


def identify_repeated_calls(
    items: list[Item | Unknown], sent: Sequence[Item | Unknown], history: Sequence[Item | Unknown]
) -> list[Item | Unknown]:
    """Replace calls that were sent without an id by the same calls of the history, which have one.

    Some clients convert the history to messages of their own and lose the ids. `sent` are the items before
    normalization. A call with another output than in the history is a new call: some models use the same call ids in
    every turn.
    """
    call_ids = _find_calls_without_id(sent)
    if not call_ids:
        return items
    replaced = list(items)
    earlier = _group_calls(history, call_ids)
    for call_id, calls in _group_calls(items, call_ids).items():
        candidates = iter(earlier.get(call_id, ()))
        for call in calls:
            if not sent[call.index].id:
                replaced[call.index] = _find_repeated(call, candidates)
    return replaced


def _find_calls_without_id(items: Sequence[Item | Unknown]) -> set[str]:
    if PAIRED_TYPES.isdisjoint(map(type, items)):  # the common case
        return set()
    return {item.call_id for item in items if isinstance(item, CALL_TYPES) and not item.id and item.call_id}


def _group_calls(items: Iterable[Item | Unknown], call_ids: Container[str]) -> dict[str, list[_Call]]:
    """Return the calls with these call ids, in order. An output belongs to the latest call before it."""
    grouped: dict[str, list[_Call]] = {}
    for index, item in enumerate(items):
        if isinstance(item, CALL_TYPES) and item.call_id in call_ids and item.call_id is not None:
            grouped.setdefault(item.call_id, []).append(_Call(index, item))
        elif isinstance(item, OUTPUT_TYPES) and item.call_id in grouped and item.call_id is not None:
            grouped[item.call_id][-1].output = item
    return grouped


def _find_repeated(call: _Call, candidates: Iterator[_Call]) -> Item | Unknown:
    """Return the next candidate that is the same call, else the call. Outputs are compared only if both have one."""
    key, output = call.make_key(), call.read_output()  # once: they may be long
    for candidate in candidates:
        if candidate.make_key() == key and (output is None or candidate.read_output() in (None, output)):
            return candidate.item
    return call.item


def _normalize_json(text: str) -> bytes | str:
    """Return JSON with its keys in order and without spaces. Clients parse arguments and encode them again."""
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
