"""Expansion of compaction items: the last compaction's content replaces the items it covers.

The compaction item stays behind its content as a marker for the next compaction. `strip_compaction` removes such
markers before a backend gets the turn. Expanding twice changes nothing.
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

_MARKER_TYPES = (Compaction, CompactionTrigger)
# A set for a fast test: hardly any request has a marker.
_MARKER_TYPES_SET = frozenset(_MARKER_TYPES)


class ExpandedItems(msgspec.Struct, frozen=True):
    """The items to read, the items that a compaction replaces, and warnings."""

    items: list[Item | Unknown]
    compacted: list[Item | Unknown]
    warnings: list[str]


def expand_compactions(
    items: Sequence[Item | Unknown], sealer: Sealer, *, project: str, answered_next: Collection[str] = ()
) -> ExpandedItems:
    """Replace the items that the last compaction covers by its content.

    A compaction that cannot be decrypted is dropped, and the items before it stay. `answered_next` are the ids of calls
    whose outputs are still to come.
    """
    if _MARKER_TYPES_SET.isdisjoint(map(type, items)):
        return ExpandedItems(list(items), [], [])
    found = find_last_compaction(items, sealer, project=project)
    index, content = found if found is not None else (-1, None)
    after, warnings = _drop_unusable_markers(items[index + 1 :])
    if content is None:
        return ExpandedItems(after, [], warnings)
    retained = content.list_items()
    seen = {id(item): item for item in (*retained, *_repair_retained(retained)[0])}
    before, compacted = _divide(items[:index], {*content.list_fingerprints(), *map(fingerprint_item, seen.values())})
    called_later = {item.call_id for item in after if isinstance(item, CALL_TYPES)}
    answered = find_answered_calls(after) | {call_id for call_id in answered_next if call_id not in called_later}
    repaired, repairs = _repair_retained(retained, answered)
    expanded = [*before, *repaired, items[index], *after]
    return ExpandedItems(expanded, [*compacted, items[index]], [*warnings, *repairs])


def _repair_retained(
    retained: list[Item | Unknown], answered: Collection[str] = ()
) -> tuple[list[Item | Unknown], list[str]]:
    """Add outputs to retained calls that have none and are not in `answered`: no client can add them."""
    repaired = repair_history([*retained, CompactionTrigger()], answered_next=answered)
    return repaired.items[:-1], repaired.repairs


def _drop_unusable_markers(items: Sequence[Item | Unknown]) -> tuple[list[Item | Unknown], list[str]]:
    """Drop compactions that cannot be decrypted, and triggers of earlier turns."""
    rest: list[Item | Unknown] = []
    warnings: list[str] = []
    for index, item in enumerate(items):
        if isinstance(item, Compaction):
            if item.encrypted_content:  # empty if the response failed during the compaction
                warnings.append(f"compaction {item.id}: its encrypted_content cannot be opened here and was left out")
        elif not isinstance(item, CompactionTrigger) or index == len(items) - 1:
            rest.append(item)
    return rest, warnings


def _divide(
    items: Sequence[Item | Unknown], covered: Collection[bytes]
) -> tuple[list[Item | Unknown], list[Item | Unknown]]:
    """Divide the items before a compaction into those that stay and those that it replaces."""
    staying: list[Item | Unknown] = []
    replaced: list[Item | Unknown] = []
    is_next_replaced = False
    for item in reversed(items):
        # Reasoning is replaced together with the item that follows it.
        gone = (
            isinstance(item, _MARKER_TYPES)
            or fingerprint_item(item) in covered
            or (is_next_replaced and isinstance(item, Reasoning))
        )
        is_next_replaced = gone and not is_never_compacted(item)
        (replaced if is_next_replaced else staying).append(item)
    return staying[::-1], replaced[::-1]


def is_never_compacted(item: Item | Unknown) -> bool:
    """Return True for system and developer messages, tools and settings: a compaction never replaces them."""
    if isinstance(item, Message):
        return item.role in ("system", "developer")
    return isinstance(item, (AdditionalTools, ConfigurationUpdate))


def is_marker(item: Item | Unknown) -> bool:
    """Return True for compactions and triggers, which no backend reads."""
    return isinstance(item, _MARKER_TYPES)


def ends_in_trigger(items: Sequence[Item | Unknown]) -> bool:
    """Return True if the last item is a trigger: the response is to be a compaction only."""
    return bool(items) and type(items[-1]) is CompactionTrigger


def check_trigger(items: Sequence[Item | Unknown]) -> None:
    """Raise InvalidRequest on a trigger that is not the last item of the input."""
    kinds = list(map(type, items[:-1]))
    if CompactionTrigger in kinds:
        raise InvalidRequest(
            "A compaction_trigger must be the last item of the input.",
            param=f"input[{kinds.index(CompactionTrigger)}]",
            code="invalid_value",
        )


def repair_before_trigger(
    items: list[Item | Unknown], *, last_response: str | None = None
) -> tuple[list[Item | Unknown], list[str]]:
    """Repair the items before a trigger at the end. The last calls may still have no output."""
    end = len(items) - ends_in_trigger(items)
    repaired = repair_history(items[:end], last_response=last_response)
    return [*repaired.items, *items[end:]], repaired.repairs


def strip_compaction(turn: Turn) -> Turn:
    """Return the turn without compaction items and settings, which backends do not support."""
    request = turn.request
    if request.context_management is not None:
        request = msgspec.structs.replace(request, context_management=None)
    elif _MARKER_TYPES_SET.isdisjoint(map(type, turn.items)):
        return turn
    items = [item for item in turn.items if not isinstance(item, _MARKER_TYPES)]
    return msgspec.structs.replace(turn, request=request, items=items)
