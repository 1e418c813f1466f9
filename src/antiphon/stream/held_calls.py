"""Tool calls that are not announced yet."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from antiphon.stream import deltas
from antiphon.stream.closed_items import make_call_id
from antiphon.stream.drafts import CallDraft, CustomCallDraft

CallDelta: TypeAlias = deltas.ToolCall | deltas.CustomToolCall
HeldDelta: TypeAlias = CallDelta | deltas.ItemPassthrough | deltas.Amend | deltas.CloseItem


class WaitingCalls(dict[int | str, list[HeldDelta]]):
    """The calls that wait for the end of an open call, with their deltas so far, in order."""

    def hold(self, delta: HeldDelta) -> bool:
        """Keep a delta of a call that waits. Return False if there is no such call."""
        held = self.get(delta.key) if self and delta.key is not None else None
        if held is not None:
            held.append(delta)
        return held is not None

    def pop_first(self) -> tuple[int | str, list[HeldDelta]]:
        key = next(iter(self))
        return key, self.pop(key)


def get_fragment(delta: CallDelta) -> str:
    return delta.arguments if isinstance(delta, deltas.ToolCall) else delta.input


def measure_text(held: Sequence[HeldDelta]) -> int:
    return sum(len(get_fragment(delta)) for delta in held if isinstance(delta, CallDelta))


def make_call_draft(
    held: Sequence[HeldDelta],
    output_index: int,
    numbers: Iterator[int],
    new_id: Callable[[str], str],
    reserve: Callable[[str], str],
) -> CallDraft:
    """Return the draft of a call, without its arguments. One of the deltas has the name."""
    calls = [delta for delta in held if isinstance(delta, CallDelta)]
    named = next(delta for delta in calls if delta.name)
    draft_type = CallDraft if isinstance(named, deltas.ToolCall) else CustomCallDraft
    item_id = new_id(draft_type.prefix)
    given = next((delta.call_id for delta in calls if delta.call_id), None)
    draft = draft_type(
        item_id,
        output_index,
        numbers,
        call_id=reserve(given or make_call_id(item_id)),
        name=named.name,
        namespace=named.namespace,
        caller=named.caller,
    )
    draft.has_end = isinstance(named, deltas.ToolCall) and named.has_end
    return draft
