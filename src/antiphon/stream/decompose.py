"""From a stream's events back to the deltas they told: composing those again tells the same events by number."""

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


def decompose_events(stream: Iterable[Event | Unknown]) -> list[Delta]:
    """The deltas behind these events. The lifecycle is not among them: `Composer.start` tells it."""
    shown = list(stream)
    token = next((event.response.id.partition("_")[2] for event in shown if isinstance(event, events.Created)), "")
    forms: dict[int, _Form] = {}
    recalled: list[Delta] = []
    for event, following in itertools.zip_longest(shown, shown[1:]):
        if isinstance(event, events.OutputItemAdded):
            forms[event.output_index] = _find_form(event, following)
        form = forms.get(getattr(event, "output_index", -1))
        if form == "whole" and isinstance(event, events.OutputItemEvent):
            recalled += _recall_whole(event, token)
        else:
            recalled += _recall(event, form)
    return recalled


_Form = Literal["said", "whole", "carried"]
_SAID = (items.Message, items.Reasoning, items.FunctionCall, items.CustomToolCall)


def _find_form(event: events.OutputItemAdded, following: Event | Unknown | None) -> _Form:
    """How a backend tells an item: in deltas of its words, at once, or event by event."""
    if isinstance(following, events.OutputItemDone) and following.item == event.item:
        return "whole"
    if isinstance(event.item, ShellCall) and event.item.status != "in_progress":
        return "whole"  # its commands are told in between
    return "said" if isinstance(event.item, _SAID) else "carried"


def _recall(event: Event | Unknown, form: _Form | None) -> Sequence[Delta]:
    if isinstance(event, Unknown):
        return [deltas.Passthrough(event)]
    if form == "carried":
        return [_recall_carried(event)]
    recollect = _RECOLLECTIONS.get(type(event))
    return recollect(event) if recollect is not None else []


def _recall_whole(event: events.OutputItemEvent, token: str) -> Sequence[Delta]:
    """At its end. An id that was made for it here is made again, so that those after it are the same, too."""
    if not isinstance(event, events.OutputItemDone):
        return []
    item = _as_output(event)
    is_ours = bool(token) and (item.id or "").partition("_")[2].startswith(token)
    return [deltas.WholeItem(replace_ids(item, "") if is_ours and not isinstance(item, Unknown) else item)]


def _recall_carried(event: Event) -> Delta:
    if isinstance(event, events.OutputItemAdded):
        item = _as_output(event)
        return deltas.OpenItem(_key(event), item, get_id_prefix(item))
    if isinstance(event, events.OutputItemDone):
        return deltas.CloseItem(_key(event), _as_output(event))
    return deltas.Passthrough(Unknown(codec.encode(event)))


def _as_output(event: events.OutputItemEvent) -> items.OutputItem | Unknown:
    return cast(items.OutputItem, event.item)  # items that are only ever input are in no output


def _recall_annotation(event: events.OutputTextAnnotationAdded) -> Sequence[Delta]:
    return [deltas.Annotate(event.annotation)] if event.annotation is not None else []


def _key(event: events.ItemEvent | events.OutputItemEvent) -> str:
    return f"told {event.output_index}"


# A seal opens its reasoning without a word; an empty one does that and nothing more.
_OPENING = deltas.ReasoningSeal("")


def _recall_added(event: events.OutputItemAdded) -> Sequence[Delta]:
    match event.item:
        case items.FunctionCall() as call:
            return [deltas.ToolCall(_key(event), "", call.name, call.call_id, call.namespace)]
        case items.CustomToolCall() as call:
            return [deltas.CustomToolCall(_key(event), "", call.name, call.call_id, call.namespace)]
        case items.Reasoning():
            return [_OPENING]
        case items.Message(phase=phase) if phase is not None:
            return [deltas.Phase(phase)]
        case _:
            return []


def _recall_done(event: events.OutputItemDone) -> Sequence[Delta]:
    """What was said of it is recalled already: what it came to beyond that comes last."""
    item = event.item
    fields = msgspec.json.decode(codec.encode(item), type=dict[str, msgspec.Raw])
    is_call = item.type in (items.FunctionCall.__struct_config__.tag, items.CustomToolCall.__struct_config__.tag)
    key = f"told {event.output_index}" if is_call else None
    sealed = item.encrypted_content if isinstance(item, items.Reasoning) else None
    return [deltas.Amend(fields, key), deltas.ReasoningSeal(sealed) if sealed else deltas.CloseItem(key)]


def _recall_part_added(event: events.ContentPartAdded) -> Sequence[Delta]:
    return [deltas.NewPart()] if event.content_index and isinstance(event.part, ReasoningText) else []


def _recall_part_done(event: events.ContentPartDone) -> Sequence[Delta]:
    # Reasoning closes its summary first, which tells nothing to decompose_events that by.
    return [] if isinstance(event.part, ReasoningText) else [deltas.NewPart()]


_RECOLLECTIONS: dict[type[Event], Callable[[Any], Sequence[Delta]]] = {
    events.OutputTextDelta: lambda event: [deltas.Text(event.delta, tuple(event.logprobs))],
    events.RefusalDelta: lambda event: [deltas.Refusal(event.delta)],
    events.OutputTextAnnotationAdded: _recall_annotation,
    events.ReasoningTextDelta: lambda event: [deltas.Reasoning(event.delta)],
    events.ReasoningSummaryTextDelta: lambda event: [deltas.ReasoningSummary(event.delta, event.summary_index)],
    events.FunctionCallArgumentsDelta: lambda event: [deltas.ToolCall(_key(event), event.delta)],
    events.CustomToolCallInputDelta: lambda event: [deltas.CustomToolCall(_key(event), event.delta)],
    events.ContentPartAdded: _recall_part_added,
    events.ContentPartDone: _recall_part_done,
    events.OutputItemAdded: _recall_added,
    events.OutputItemDone: _recall_done,
}
