"""Turn the events of a stream back into the deltas they were composed from.

Composing these deltas again gives the same events with the same sequence numbers.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from antiphon.protocol import codec, events, items
from antiphon.protocol.content import ReasoningText
from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import get_id_prefix, replace_ids

# The kinds of deltas that an item's events were composed from: deltas of its text, one `WholeItem`, or `OpenItem`,
# events and `CloseItem`.
_Form = Literal["deltas", "whole", "passthrough"]

_DELTA_ITEMS = (items.Message, items.Reasoning, items.FunctionCall, items.CustomToolCall)
# An empty seal opens a reasoning item and adds nothing to it.
_OPEN_REASONING = deltas.ReasoningSeal("")


def decompose_events(stream: Iterable[Event | Unknown]) -> list[Delta]:
    """Return the deltas behind these events. Lifecycle events have none: `Composer.start` emits them."""
    stream = list(stream)
    # Generated item ids start, after their prefix, with this part of the response id.
    own_id = next((event.response.id.partition("_")[2] for event in stream if isinstance(event, events.Created)), "")
    forms: dict[int, _Form] = {}
    decomposed: list[Delta] = []
    for event, following in itertools.zip_longest(stream, stream[1:]):
        if isinstance(event, events.OutputItemAdded):
            forms[event.output_index] = _find_form(event, following)
        form = forms.get(getattr(event, "output_index", -1))
        if form == "whole" and isinstance(event, events.OutputItemEvent):
            decomposed += _decompose_whole(event, own_id)
        else:
            decomposed += _decompose_event(event, form)
    return decomposed


def _find_form(event: events.OutputItemAdded, following: Event | Unknown | None) -> _Form:
    if isinstance(following, events.OutputItemDone) and following.item == event.item:
        return "whole"
    if isinstance(event.item, ShellCall) and event.item.status != "in_progress":
        return "whole"  # the events of its commands come before `output_item.done`
    return "deltas" if isinstance(event.item, _DELTA_ITEMS) else "passthrough"


def _decompose_event(event: Event | Unknown, form: _Form | None) -> Sequence[Delta]:
    if isinstance(event, Unknown):
        return [deltas.Passthrough(event)]
    if form == "passthrough":
        return [_decompose_passthrough(event)]
    handle = _HANDLERS.get(type(event))
    return handle(event) if handle is not None else []


def _decompose_whole(event: events.OutputItemEvent, own_id: str) -> Sequence[Delta]:
    """Return the `WholeItem` at the end of an item.

    An id that the composer made is removed. The composer makes the same id again, so that later ids are the same too.
    """
    if not isinstance(event, events.OutputItemDone):
        return []
    item = _get_output_item(event)
    is_ours = bool(own_id) and (item.id or "").partition("_")[2].startswith(own_id)
    return [deltas.WholeItem(replace_ids(item, "") if is_ours and not isinstance(item, Unknown) else item)]


def _decompose_passthrough(event: Event) -> Delta:
    if isinstance(event, events.OutputItemAdded):
        item = _get_output_item(event)
        return deltas.OpenItem(_make_key(event), item, get_id_prefix(item))
    if isinstance(event, events.OutputItemDone):
        return deltas.CloseItem(_make_key(event), _get_output_item(event))
    return deltas.Passthrough(Unknown(codec.encode(event)))


def _get_output_item(event: events.OutputItemEvent) -> items.OutputItem | Unknown:
    return cast(items.OutputItem, event.item)  # an output never has an item type that is input only


def _decompose_annotation(event: events.OutputTextAnnotationAdded) -> Sequence[Delta]:
    return [deltas.Annotate(event.annotation)] if event.annotation is not None else []


def _decompose_added(event: events.OutputItemAdded) -> Sequence[Delta]:
    match event.item:
        case items.FunctionCall() as call:
            key = _make_key(event)
            return [deltas.ToolCall(key, "", call.name, call.call_id, call.namespace, call.caller, has_end=True)]
        case items.CustomToolCall() as call:
            return [deltas.CustomToolCall(_make_key(event), "", call.name, call.call_id, call.namespace, call.caller)]
        case items.Reasoning(status=status):
            return [_OPEN_REASONING] if status is not None else [deltas.NoStatus(), _OPEN_REASONING]
        case items.Message(phase=phase) if phase is not None:
            return [deltas.Phase(phase)]
        case _:
            return []


def _decompose_done(event: events.OutputItemDone) -> Sequence[Delta]:
    """Return an `Amend` with all fields of the final item, and the delta that closes it."""
    item = event.item
    fields = msgspec.json.decode(codec.encode(item), type=dict[str, msgspec.Raw])
    is_call = item.type in (items.FunctionCall.__struct_config__.tag, items.CustomToolCall.__struct_config__.tag)
    key = _make_key(event) if is_call else None
    sealed = item.encrypted_content if isinstance(item, items.Reasoning) else None
    return [deltas.Amend(fields, key), deltas.ReasoningSeal(sealed) if sealed else deltas.CloseItem(key)]


def _decompose_part_added(event: events.ContentPartAdded) -> Sequence[Delta]:
    return [deltas.NewPart()] if event.content_index and isinstance(event.part, ReasoningText) else []


def _decompose_part_done(event: events.ContentPartDone) -> Sequence[Delta]:
    # A reasoning item closes its summary before its text parts, so the end of a text part gives no `NewPart`.
    return [] if isinstance(event.part, ReasoningText) else [deltas.NewPart()]


def _make_key(event: events.ItemEvent | events.OutputItemEvent) -> str:
    return f"sent {event.output_index}"


_HANDLERS: dict[type[Event], Callable[[Any], Sequence[Delta]]] = {
    events.OutputTextDelta: lambda event: [deltas.Text(event.delta, tuple(event.logprobs))],
    events.RefusalDelta: lambda event: [deltas.Refusal(event.delta)],
    events.OutputTextAnnotationAdded: _decompose_annotation,
    events.ReasoningTextDelta: lambda event: [deltas.Reasoning(event.delta)],
    events.ReasoningSummaryTextDelta: lambda event: [deltas.ReasoningSummary(event.delta, event.summary_index)],
    events.FunctionCallArgumentsDelta: lambda event: [deltas.ToolCall(_make_key(event), event.delta)],
    events.CustomToolCallInputDelta: lambda event: [deltas.CustomToolCall(_make_key(event), event.delta)],
    events.ContentPartAdded: _decompose_part_added,
    events.ContentPartDone: _decompose_part_done,
    events.OutputItemAdded: _decompose_added,
    events.OutputItemDone: _decompose_done,
}
