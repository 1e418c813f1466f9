"""From another server's Responses stream to deltas: what is known is told anew, so that order and numbers are right.

Words, calls and reasoning become deltas, and our composer gives them ids and indexes that hold. Items of other types
keep their own events, under ids of ours. What nobody here knows passes through as it is.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from msgspec import Raw

from antiphon.backends.responses import wire
from antiphon.backends.responses.item_tracking import Closing, Kind, Track, Tracks, Voice, find_kind
from antiphon.errors import UpstreamError
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import decode_output_item, get_id_prefix
from antiphon.stream.sse import SseMessage
from antiphon.upstream.error_mapping import decode_json_or_text, make_broken_stream_error, map_error_payload
from antiphon.upstream.fields import ServedModel, parse_logprobs
from antiphon.upstream.usage import read_usage

DONE = b"[DONE]"
_SIGNS_OF_LIFE = frozenset({"keepalive", "response.keepalive", "ping", "heartbeat"})
_TOO_LONG = (None, "max_output_tokens", "max_tokens", "length")

Settle = Callable[[str, Sequence[Raw]], None]


class ResponsesReader:
    """Reads one answer.

    `settle` gets the id and the output of a completed response. `served_model` observes the model's name.
    """

    is_complete = False  # the event that says that an answer is whole is the last

    def __init__(
        self, *, secrets: Collection[str] = (), settle: Settle | None = None, served_model: ServedModel | None = None
    ) -> None:
        self.finished = False
        self._served_model = served_model
        self._secrets = secrets
        self._settle = settle
        self._response_id = ""
        self._tracks = Tracks()
        self._voice = Voice()
        self._held: list[tuple[wire.Event, bytes]] = []
        self._done: list[Raw] = []

    def read(self, message: SseMessage) -> Sequence[Delta]:
        told = self._read(message)
        served_model = self._served_model
        if served_model is None or not told:
            return told
        self._served_model = None
        return served_model.announce(told)

    def _read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data == DONE:
            return ()
        if message.event == "error":  # whatever stands in it
            raise map_error_payload(decode_json_or_text(message.data), secrets=self._secrets)
        event = wire.read_event(message.data)
        kind = event.type = event.type if isinstance(event.type, str) else message.event or ""
        handle = self._HANDLERS.get(kind)
        if handle is not None:
            return handle(self, event)
        if kind == "error" or (event.error is not None and not kind):
            raise map_error_payload(wire.read_object(message.data), secrets=self._secrets)
        if event.object == "response":  # the whole answer in one piece, from a server that does not stream
            return self._end(wire.read_outcome(message.data))
        if not kind or kind in _SIGNS_OF_LIFE:
            return ()
        return self._pass_on(event, message.data)

    def end(self) -> Sequence[Delta]:
        raise make_broken_stream_error()

    # What is said

    def _text_delta(self, event: wire.Event) -> Sequence[Delta]:
        track, part = self._tracks.follow(event, "message"), wire.read_index(event.content_index)
        if track.closed:
            return ()
        text = wire.read_text(event.delta)
        if not text and not event.logprobs:
            return ()
        track.say("text", part, text)
        said = deltas.Text(text, parse_logprobs(event.logprobs) if event.logprobs else ())
        if track is self._voice.speaker and part == track.part:  # nearly always
            return (said,)
        return (*self._voice.take(track, part), said)

    def _text_done(self, event: wire.Event) -> Sequence[Delta]:
        return self._complete(event, "message", {"type": "output_text", "text": event.text, "logprobs": event.logprobs})

    def _refusal_delta(self, event: wire.Event) -> Sequence[Delta]:
        track, part = self._tracks.follow(event, "message"), wire.read_index(event.content_index)
        if track.closed:
            return ()
        return (*self._voice.take(track, part), deltas.Refusal(track.say("refusal", part, wire.read_text(event.delta))))

    def _refusal_done(self, event: wire.Event) -> Sequence[Delta]:
        return self._complete(event, "message", {"type": "refusal", "refusal": event.refusal})

    def _annotation(self, event: wire.Event) -> Sequence[Delta]:
        track, part = self._tracks.follow(event, "message"), wire.read_index(event.content_index)
        if track.closed or not wire.read_object(event.annotation):
            return ()
        track.annotations[part] = track.annotations.get(part, 0) + 1
        return (*self._voice.take(track, part), deltas.Annotate(wire.read_annotation(event.annotation)))

    def _part_done(self, event: wire.Event) -> Sequence[Delta]:
        part = event.part if isinstance(event.part, dict) else {}
        return self._complete(event, "reasoning" if part.get("type") == "reasoning_text" else "message", part)

    def _reasoning_delta(self, event: wire.Event) -> Sequence[Delta]:
        track, part = self._tracks.follow(event, "reasoning"), wire.read_index(event.content_index)
        if track.closed:
            return ()
        return (*self._voice.take(track, part), deltas.Reasoning(track.say("text", part, wire.read_text(event.delta))))

    def _reasoning_done(self, event: wire.Event) -> Sequence[Delta]:
        return self._complete(event, "reasoning", {"type": "reasoning_text", "text": event.text})

    def _summary_delta(self, event: wire.Event) -> Sequence[Delta]:
        track, index = self._tracks.follow(event, "reasoning"), wire.read_index(event.summary_index)
        if track.closed:
            return ()
        text = track.say("summary", index, wire.read_text(event.delta))
        return (*self._voice.take(track), deltas.ReasoningSummary(text, index))

    def _summary_done(self, event: wire.Event) -> Sequence[Delta]:
        text = event.text if event.text is not None or not isinstance(event.part, dict) else event.part.get("text")
        track = self._tracks.find(event.item_id, event.output_index, "reasoning")
        if track is None or track.closed:
            return ()
        return Closing(track, self._voice).complete_summary(wire.read_index(event.summary_index), text)

    def _complete(self, event: wire.Event, kind: Kind, part: dict[str, Any]) -> Sequence[Delta]:
        """A text as a whole: what its deltas left out is said now."""
        track = self._tracks.find(event.item_id, event.output_index, kind)
        if track is None or track.closed:
            return ()
        return Closing(track, self._voice).complete_part(wire.read_index(event.content_index), part)

    # Calls

    def _arguments_delta(self, event: wire.Event) -> Sequence[Delta]:
        track = self._tracks.follow(event, "function_call")
        text = track.say("call", 0, wire.read_text(event.delta)) if not track.closed else ""
        return (deltas.ToolCall(track.key, text),) if text else ()

    def _arguments_done(self, event: wire.Event) -> Sequence[Delta]:
        return self._complete_call(event, "function_call", {"arguments": event.arguments, "name": event.name})

    def _input_delta(self, event: wire.Event) -> Sequence[Delta]:
        track = self._tracks.follow(event, "custom_tool_call")
        text = track.say("call", 0, wire.read_text(event.delta)) if not track.closed else ""
        return (deltas.CustomToolCall(track.key, text),) if text else ()

    def _input_done(self, event: wire.Event) -> Sequence[Delta]:
        return self._complete_call(event, "custom_tool_call", {"input": event.input, "name": event.name})

    def _complete_call(self, event: wire.Event, kind: Kind, call: dict[str, Any]) -> Sequence[Delta]:
        track = self._tracks.find(event.item_id, event.output_index, kind)
        if track is None or track.closed:
            return ()
        return Closing(track, self._voice).complete_call(call)

    # Items

    def _item_added(self, event: wire.Event) -> Sequence[Delta]:
        item = wire.read_item(event.item)
        known = self._tracks.find(item.get("id"), None)
        if known is not None and not known.closed:
            return ()
        return self._begin(event.item, item, event.output_index)[1]

    def _begin(self, raw: Raw, item: dict[str, Any], output_index: Any) -> tuple[Track, Sequence[Delta]]:
        track = self._tracks.begin(find_kind(item.get("type")), item.get("id"), output_index)
        track.type, track.call_id, track.phase = item.get("type"), item.get("call_id"), item.get("phase")
        if track.kind in ("function_call", "custom_tool_call"):
            told = Closing(track, self._voice).announce_call(item)
        elif track.kind == "carried":
            opened = decode_output_item(bytes(raw))
            told = [
                deltas.OpenItem(track.key, opened, get_id_prefix(opened)),
                *self._release(track, item, output_index),
            ]
            self._voice.fall_silent()
        else:
            told = []
        return track, told

    def _release(self, track: Track, item: dict[str, Any], output_index: Any) -> list[Delta]:
        """The events about an item that came before it was announced."""
        mine = [
            (event, data)
            for event, data in self._held
            if (event.item_id is not None and event.item_id == item.get("id"))
            or (event.output_index is not None and event.output_index == output_index)
        ]
        self._held = [held for held in self._held if held not in mine]
        return [deltas.ItemEvent(Unknown(data), track.key) for _, data in mine]

    def _item_done(self, event: wire.Event) -> Sequence[Delta]:
        item = wire.read_item(event.item)
        kind = find_kind(item.get("type"))
        track = self._tracks.find(item.get("id"), event.output_index, kind)
        if track is not None and track.closed:
            if item.get("call_id") == track.call_id and not self._tracks.is_over(track, item.get("id")):
                return ()  # told a second time
            track = None
        self._done.append(event.item)
        return self._finish_item(track, event.item, item, event.output_index)

    def _finish_item(
        self, track: Track | None, raw: Raw, item: dict[str, Any], output_index: Any = None
    ) -> Sequence[Delta]:
        told: list[Delta] = []
        if track is None:
            track, begun = self._begin(raw, item, output_index)
            told += begun
        told += Closing(track, self._voice).close(raw, item)
        return told

    def _pass_on(self, event: wire.Event, data: bytes) -> Sequence[Delta]:
        track = self._tracks.find(event.item_id, event.output_index)
        if track is None and (event.item_id is not None or event.output_index is not None):
            self._held.append((event, data))  # what it is about may still be announced
            return ()
        if track is None or (track.kind in ("message", "reasoning") and track is not self._voice.speaker):
            return (deltas.Passthrough(Unknown(data)),)
        return (deltas.ItemEvent(Unknown(data), None if track is self._voice.speaker else track.key),)

    # The response

    def _begun(self, event: wire.Event) -> Sequence[Delta]:
        outcome = wire.read_outcome(event.response)
        self._response_id = outcome.id if isinstance(outcome.id, str) else self._response_id
        self._hear(outcome)
        return ()

    def _hear(self, outcome: wire.Outcome) -> None:
        if self._served_model is not None:
            self._served_model.observe(outcome.model)

    def _ended(self, event: wire.Event) -> Sequence[Delta]:
        outcome = wire.read_outcome(event.response)
        name = event.type.removeprefix("response.")
        if name == "failed" or outcome.status not in ("failed", "incomplete", "cancelled"):
            outcome.status = name
        return self._end(outcome)

    def _end(self, outcome: wire.Outcome) -> Sequence[Delta]:
        if outcome.status not in ("completed", "incomplete"):
            raise self._explain(outcome)
        self._hear(outcome)
        output = outcome.list_output()
        if outcome.id is None and not output and not any(self._tracks):
            raise UpstreamError("The upstream ended its response without having said anything.")
        told = self._tell_rest(output)
        usage = read_usage(outcome.usage)
        if usage is not None:
            told.append(deltas.TokenUsage(usage))
        told.append(_find_finish(outcome))
        self.finished = True
        if self._settle is not None and outcome.status == "completed":
            response_id = outcome.id if isinstance(outcome.id, str) else self._response_id
            self._settle(response_id, output or self._done)
        return told

    def _tell_rest(self, output: list[Raw]) -> list[Delta]:
        """What the final list has and the stream has not told: items never announced, or never done."""
        told: list[Delta] = []
        items = [wire.read_item(raw) for raw in output]
        tracks = self._tracks.match(items)
        for place, (raw, item, track) in enumerate(zip(output, items, tracks, strict=True)):
            if (track is None or not track.closed) and not _is_too_late(item, tracks[place + 1 :]):
                told += self._finish_item(track, raw, item)
        return told + [deltas.Passthrough(Unknown(data)) for _, data in self._held]

    def _explain(self, outcome: wire.Outcome) -> Exception:
        if outcome.error:
            return map_error_payload({"error": outcome.error}, secrets=self._secrets)
        return UpstreamError(f"The upstream ended its response with the status '{outcome.status}' and no reason.")

    def _nothing(self, _: wire.Event) -> Sequence[Delta]:
        return ()

    _HANDLERS: ClassVar[dict[str, Callable[["ResponsesReader", wire.Event], Sequence[Delta]]]] = {
        "response.output_text.delta": _text_delta,
        "response.created": _begun,
        "response.queued": _begun,
        "response.in_progress": _begun,
        "response.completed": _ended,
        "response.incomplete": _ended,
        "response.failed": _ended,
        "response.cancelled": _ended,
        "response.output_item.added": _item_added,
        "response.output_item.done": _item_done,
        "response.content_part.added": _nothing,
        "response.content_part.done": _part_done,
        "response.output_text.done": _text_done,
        "response.output_text.annotation.added": _annotation,
        "response.refusal.delta": _refusal_delta,
        "response.refusal.done": _refusal_done,
        "response.reasoning_text.delta": _reasoning_delta,
        "response.reasoning_text.done": _reasoning_done,
        "response.reasoning.delta": _reasoning_delta,
        "response.reasoning.done": _reasoning_done,
        "response.reasoning_summary_part.added": _nothing,
        "response.reasoning_summary_part.done": _summary_done,
        "response.reasoning_summary_text.delta": _summary_delta,
        "response.reasoning_summary_text.done": _summary_done,
        "response.reasoning_summary.delta": _summary_delta,
        "response.reasoning_summary.done": _summary_done,
        "response.function_call_arguments.delta": _arguments_delta,
        "response.function_call_arguments.done": _arguments_done,
        "response.custom_tool_call_input.delta": _input_delta,
        "response.custom_tool_call_input.done": _input_done,
    }


def _is_too_late(item: dict[str, Any], later: Sequence[Track | None]) -> bool:
    """Whether only a seal is left to tell of reasoning, after what it led to: nobody could use it there."""
    if item.get("type") != "reasoning" or item.get("summary") or item.get("content"):
        return False
    return any(track is not None for track in later)


def _find_finish(outcome: wire.Outcome) -> deltas.Finish:
    if outcome.status == "completed":
        return deltas.Finish()
    details = outcome.incomplete_details
    reason = details.get("reason") if isinstance(details, dict) else None
    if reason == "content_filter":
        return deltas.Finish("content_filter")
    return deltas.Finish("length", None if reason in _TOO_LONG else str(reason))
