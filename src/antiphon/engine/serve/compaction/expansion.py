"""Compactions in a conversation: the last one counts, and what it stands for comes in the place of what it covers.

The item itself stays behind what it was expanded to, as a sign for the next compaction; `strip` takes such signs out
before a model reads. Expanding what is expanded changes nothing.
"""

from collections.abc import Collection, Sequence

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.items import CALL_TYPES
from antiphon.engine.prepare.call_pairs import find_answered_calls
from antiphon.engine.prepare.history_repair import repair_history
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compaction_item import find_last_compaction, fingerprint_item
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import Compaction, CompactionTrigger, ConfigurationUpdate, Item, Message, Reasoning
from antiphon.protocol.unions import Unknown

_SIGNS = (Compaction, CompactionTrigger)
# Every request is asked whether it has any, and hardly one has.
_KINDS_OF_SIGNS = frozenset(_SIGNS)


class ExpandedItems(msgspec.Struct, frozen=True):
    """The items to read, the items that a compaction replaces, and warnings."""

    items: list[Item | Unknown]
    compacted: list[Item | Unknown]
    warnings: list[str]


def expand_compactions(
    items: Sequence[Item | Unknown], sealer: Sealer, *, project: str, answered_next: Collection[str] = ()
) -> ExpandedItems:
    """The conversation as its last compaction has it. One that does not open is left out, and nothing with it.

    `answered_next` are calls whose outputs are still to come.
    """
    if _KINDS_OF_SIGNS.isdisjoint(map(type, items)):
        return ExpandedItems(list(items), [], [])
    found = find_last_compaction(items, sealer, project=project)
    place, memory = found if found is not None else (-1, None)
    after, warnings = _drop_useless(items[place + 1 :])
    if memory is None:
        return ExpandedItems(after, [], warnings)
    kept = memory.unfold()
    seen = {id(item): item for item in (*kept, *_mend(kept)[0])}
    before, compacted = _divide(items[:place], {*memory.marks(), *map(fingerprint_item, seen.values())})
    asked_later = {item.call_id for item in after if isinstance(item, CALL_TYPES)}
    answered = find_answered_calls(after) | {call_id for call_id in answered_next if call_id not in asked_later}
    mended, repairs = _mend(kept, answered)
    return ExpandedItems([*before, *mended, items[place], *after], [*compacted, items[place]], [*warnings, *repairs])


def _mend(kept: list[Item | Unknown], answered: Collection[str] = ()) -> tuple[list[Item | Unknown], list[str]]:
    """What a compaction kept, with a note on calls that were open and that nothing answers: no client can mend it."""
    mended = repair_history([*kept, CompactionTrigger()], answered_next=answered)
    return mended.items[:-1], mended.repairs


def _drop_useless(items: Sequence[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Without compactions, none of which opens, and triggers of earlier turns."""
    kept: list[Item | Unknown] = []
    warnings: list[str] = []
    for index, item in enumerate(items):
        if isinstance(item, Compaction):
            if item.encrypted_content:  # else it never came about: the response failed on the way
                warnings.append(f"compaction {item.id}: its encrypted_content cannot be opened here and was left out")
        elif not isinstance(item, CompactionTrigger) or index == len(items) - 1:
            kept.append(item)
    return kept, warnings


def _divide(
    items: Sequence[Item | Unknown], covered: Collection[bytes]
) -> tuple[list[Item | Unknown], list[Item | Unknown]]:
    """What comes before a compaction: what stays there, and what it stands for."""
    stays: list[Item | Unknown] = []
    goes: list[Item | Unknown] = []
    led_to_gone = False
    for item in reversed(items):
        # Reasoning is of no use without what it led to.
        gone = (
            isinstance(item, _SIGNS)
            or fingerprint_item(item) in covered
            or (led_to_gone and isinstance(item, Reasoning))
        )
        led_to_gone = gone and not is_never_compacted(item)
        (goes if led_to_gone else stays).append(item)
    return stays[::-1], goes[::-1]


def is_never_compacted(item: Item | Unknown) -> bool:
    """Messages of the system or the developer, tools and settings hold on: no compaction covers them."""
    if isinstance(item, Message):
        return item.role in ("system", "developer")
    return isinstance(item, (AdditionalTools, ConfigurationUpdate))


def is_marker(item: Item | Unknown) -> bool:
    """Return True for compactions and triggers, which no backend reads."""
    return isinstance(item, _SIGNS)


def ends_in_trigger(items: Sequence[Item | Unknown]) -> bool:
    """Whether a compaction is all that is asked for."""
    return bool(items) and isinstance(items[-1], CompactionTrigger)


def check_trigger(items: Sequence[Item | Unknown]) -> None:
    """Raise on a trigger anywhere but at the end of the input."""
    kinds = list(map(type, items[:-1]))
    if CompactionTrigger in kinds:
        raise InvalidRequest(
            "A compaction_trigger must be the last item of the input.",
            param=f"input[{kinds.index(CompactionTrigger)}]",
            code="invalid_value",
        )


def repair_before_trigger(items: list[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Mend what is to be compacted. Calls at its end stay open, though a trigger may follow them."""
    end = len(items) - ends_in_trigger(items)
    mended = repair_history(items[:end])
    return [*mended.items, *items[end:]], mended.repairs


def strip_compaction(turn: Turn) -> Turn:
    """The turn as a backend reads it. What it says about compaction is not for backends."""
    request = turn.request
    if request.context_management is not None:
        request = msgspec.structs.replace(request, context_management=None)
    elif _KINDS_OF_SIGNS.isdisjoint(map(type, turn.items)):
        return turn
    items = [item for item in turn.items if not isinstance(item, _SIGNS)]
    return msgspec.structs.replace(turn, request=request, items=items)
