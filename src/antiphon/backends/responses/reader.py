"""Translate another server's Responses stream into deltas.

Text, calls and reasoning become deltas, and the composer gives them correct ids and indexes. Items of other types keep
their own events, with new ids. Unknown events pass through unchanged.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from antiphon.backends.responses import wire
from antiphon.backends.responses.item_tracking import (
    CurrentItem,
    ItemCompleter,
    ItemKind,
    UpstreamItem,
    UpstreamItems,
    find_kind,
)
from antiphon.errors import UpstreamError
from antiphon.protocol.json_text import JSON_ERRORS
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.passthrough import decode_output_item, get_id_prefix
from antiphon.stream.sse import SseMessage
from antiphon.upstream.delta_stream import PlainAnswerReader
from antiphon.upstream.error_mapping import (
    decode_json_or_text,
    describe_value,
    make_broken_stream_error,
    map_error_payload,
)
from antiphon.upstream.fields import ServedModel, parse_logprobs
from antiphon.upstream.usage import parse_usage

DONE = b"[DONE]"
_DEFAULT_LIMITS = AnswerLimits()
# Limits for the events of an answer that wait for their item. Later ones are dropped.
_MAX_HELD = 1000
_MAX_HELD_SIZE = 16 * 1024 * 1024
_KEEPALIVES = frozenset({"keepalive", "response.keepalive", "ping", "heartbeat"})
_STREAMED_KINDS = ("message", "function_call", "custom_tool_call")
_LENGTH_REASONS = (None, "max_output_tokens", "max_tokens", "length")

OnCompleted = Callable[[str, Sequence[Raw]], None]


class ResponsesReader(PlainAnswerReader):
    """Reads one answer.

    `on_completed` is called with the id and output of a completed response. `served_model` records the name of the
    model that answers. `estimate` returns the usage for the output if the server sends none. An answer with more items
    than `limits` permit is an error.
    """

    is_complete = False  # the terminal event is the last one, so there is nothing to read after it

    def __init__(
        self,
        *,
        secrets: Collection[str] = (),
        on_completed: OnCompleted | None = None,
        served_model: ServedModel | None = None,
        estimate: Callable[[Sequence[Raw]], Usage] | None = None,
        limits: AnswerLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.finished = False
        self._limits = limits
        self._served_model = served_model
        self._estimate = estimate
        self._secrets = secrets
        self._on_completed = on_completed
        self._response_id = ""
        self._items = UpstreamItems(limits)
        self._current = CurrentItem()
        self._unmatched: list[tuple[wire.UpstreamEvent, bytes]] = []
        self._held_count = self._held_size = 0
        self._done_items: list[Raw] = []

    def read(self, message: SseMessage) -> Sequence[Delta]:
        emitted = self._read(message)
        if self._held_count and emitted and self._current.item is not None:
            emitted = [*emitted, *self._current.item.take_held_events()]
        served_model = self._served_model
        if served_model is None or not emitted:
            return emitted
        self._served_model = None
        return served_model.announce(emitted)

    def read_plain_answer(self, body: bytes) -> Sequence[Delta]:
        if self._on_completed is not None or not self._limits.max_answer_items:
            return ()
        try:
            response = wire.decode_plain_response(body)
        except JSON_ERRORS:
            return ()
        usage = parse_usage(response.usage)
        if usage is None:
            return ()
        self.finished = True
        emitted: list[Delta] = [
            deltas.Text(response.output[0].content[0].text),
            deltas.TokenUsage(usage),
            deltas.Finish(),
        ]
        if self._served_model is None:
            return emitted
        self._served_model.observe(response.model)
        return self._served_model.announce(emitted)

    def _read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data == DONE:
            return ()
        if message.event == "error":
            raise map_error_payload(decode_json_or_text(message.data), secrets=self._secrets)
        event = wire.read_event(message.data)
        is_typed = isinstance(event.type, str)
        kind = event.type = event.type if is_typed else message.event or ""
        handle = self._HANDLERS.get(kind)
        if handle is not None:
            return handle(self, event)
        if kind == "error" or (event.error is not None and not kind):
            raise map_error_payload(wire.read_object(message.data), secrets=self._secrets)
        if event.object == "response":  # an answer that was not streamed
            response = wire.read_response(message.data)
            if response.status is None:
                response.status = "incomplete" if response.incomplete_details else "completed"
            return self._finish(response)
        if not is_typed or not kind or kind in _KEEPALIVES:
            return ()
        return self._pass_through(event, message.data)

    def end(self) -> Sequence[Delta]:
        raise make_broken_stream_error()

    # Text, refusals and reasoning

    def _read_text_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item, part = self._items.find_or_add(event, "message"), wire.read_index(event.content_index)
        if item.is_closed:
            return ()
        text = wire.read_text(event.delta)
        if not text and not event.logprobs:
            return ()
        item.add_text("text", part, text)
        delta = deltas.Text(text, parse_logprobs(event.logprobs) if event.logprobs else ())
        if item is self._current.item and part == item.part:  # the most frequent case
            return (delta,)
        return (*self._current.switch_to(item, part), delta)

    def _read_text_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        return self._complete(event, "message", {"type": "output_text", "text": event.text, "logprobs": event.logprobs})

    def _read_refusal_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item, part = self._items.find_or_add(event, "message"), wire.read_index(event.content_index)
        if item.is_closed:
            return ()
        text = wire.read_text(event.delta)
        if not text:
            return ()
        return (*self._current.switch_to(item, part), deltas.Refusal(item.add_text("refusal", part, text)))

    def _read_refusal_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        return self._complete(event, "message", {"type": "refusal", "refusal": event.refusal})

    def _read_annotation(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item, part = self._items.find_or_add(event, "message"), wire.read_index(event.content_index)
        if item.is_closed or not wire.read_object(event.annotation):
            return ()
        item.annotations[part] = item.annotations.get(part, 0) + 1
        return (*self._current.switch_to(item, part), deltas.Annotate(wire.read_annotation(event.annotation)))

    def _read_part_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        part = event.part if isinstance(event.part, dict) else {}
        return self._complete(event, "reasoning" if part.get("type") == "reasoning_text" else "message", part)

    def _read_reasoning_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item, part = self._items.find_or_add(event, "reasoning"), wire.read_index(event.content_index)
        if item.is_closed:
            return ()
        text = wire.read_text(event.delta)
        if not text:
            return ()
        return (*self._current.switch_to(item, part), deltas.Reasoning(item.add_text("text", part, text)))

    def _read_reasoning_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        return self._complete(event, "reasoning", {"type": "reasoning_text", "text": event.text})

    def _read_summary_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item, index = self._items.find_or_add(event, "reasoning"), wire.read_index(event.summary_index)
        if item.is_closed:
            return ()
        text = item.add_text("summary", index, wire.read_text(event.delta))
        return (*self._current.switch_to(item), deltas.ReasoningSummary(text, index))

    def _read_summary_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        text = event.text if event.text is not None or not isinstance(event.part, dict) else event.part.get("text")
        item = self._items.find(event.item_id, event.output_index, "reasoning")
        if item is None or item.is_closed:
            return ()
        return ItemCompleter(item, self._current).complete_summary(wire.read_index(event.summary_index), text)

    def _complete(self, event: wire.UpstreamEvent, kind: ItemKind, part: dict[str, Any]) -> Sequence[Delta]:
        """Emit the end of a text that the deltas omitted."""
        item = self._items.find(event.item_id, event.output_index, kind)
        if item is None or item.is_closed:
            return ()
        return ItemCompleter(item, self._current).complete_part(wire.read_index(event.content_index), part)

    # Calls

    def _read_arguments_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item = self._items.find_or_add(event, "function_call")
        text = item.add_text("call", 0, wire.read_text(event.delta)) if not item.is_closed else ""
        return (deltas.ToolCall(item.key, text),) if text else ()

    def _read_arguments_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        return self._complete_call(event, "function_call", {"arguments": event.arguments, "name": event.name})

    def _read_input_delta(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        item = self._items.find_or_add(event, "custom_tool_call")
        text = item.add_text("call", 0, wire.read_text(event.delta)) if not item.is_closed else ""
        return (deltas.CustomToolCall(item.key, text),) if text else ()

    def _read_input_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        return self._complete_call(event, "custom_tool_call", {"input": event.input, "name": event.name})

    def _complete_call(self, event: wire.UpstreamEvent, kind: ItemKind, call: dict[str, Any]) -> Sequence[Delta]:
        item = self._items.find(event.item_id, event.output_index, kind)
        if item is None or item.is_closed:
            return ()
        return ItemCompleter(item, self._current).complete_call(call)

    # Items

    def _read_item_added(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        fields = wire.read_item(event.item)
        known = self._items.find(fields.get("id"), None)
        if known is not None and not known.is_closed:
            return ()
        return self._announce(event.item, fields, event.output_index)[1]

    def _announce(self, raw: Raw, fields: dict[str, Any], output_index: Any) -> tuple[UpstreamItem, Sequence[Delta]]:
        item = self._items.add(find_kind(fields.get("type")), fields.get("id"), output_index)
        item.type, item.call_id, item.phase = fields.get("type"), fields.get("call_id"), fields.get("phase")
        item.has_status = fields.get("status") is not None
        if self._unmatched:
            self._match_events(item, fields, output_index)
        if item.kind in ("function_call", "custom_tool_call"):
            emitted = ItemCompleter(item, self._current).announce_call(fields)
        elif item.kind == "passthrough":
            opened = decode_output_item(bytes(raw))
            emitted = [deltas.OpenItem(item.key, opened, get_id_prefix(opened)), *item.take_held_events()]
            self._current.clear()
        else:
            emitted = []
        return item, emitted

    def _match_events(self, item: UpstreamItem, fields: dict[str, Any], output_index: Any) -> None:
        """Hold the events that arrived before their item was announced until the item is open."""
        unmatched, self._unmatched = self._unmatched, []
        for event, data in unmatched:
            if (event.item_id is not None and event.item_id == fields.get("id")) or (
                event.output_index is not None and event.output_index == output_index
            ):
                item.held_events.append(data)
            else:
                self._unmatched.append((event, data))

    def _read_item_done(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        fields = wire.read_item(event.item)
        kind = find_kind(fields.get("type"))
        item = self._items.find(fields.get("id"), event.output_index, kind)
        if item is not None and item.is_closed:
            if fields.get("call_id") == item.call_id and not self._items.is_index_reused(item, fields.get("id")):
                return ()  # a repeated event
            item = None
        if item is None:
            item = self._items.find_ended(kind, fields)
        self._done_items.append(event.item)
        return self._finish_item(item, event.item, fields, event.output_index)

    def _finish_item(
        self, item: UpstreamItem | None, raw: Raw, fields: dict[str, Any], output_index: Any = None
    ) -> Sequence[Delta]:
        announced: Sequence[Delta] = ()
        if item is None:
            item, announced = self._announce(raw, fields, output_index)
        return [*announced, *ItemCompleter(item, self._current).close(raw, fields)]

    def _pass_through(self, event: wire.UpstreamEvent, data: bytes) -> Sequence[Delta]:
        """Forward an unknown event.

        An event of an item that is not open yet is held until then. After the end of its item it is dropped, because
        clients reject it.
        """
        if event.item_id is None and event.output_index is None:
            return (deltas.Passthrough(Unknown(data)),)
        item = self._items.find(event.item_id, event.output_index)
        if item is None:
            if self._can_hold(data):
                self._unmatched.append((event, data))
        elif item is self._current.item:
            return (deltas.ItemPassthrough(Unknown(data)),)
        elif item.is_waiting:
            if self._can_hold(data):
                item.held_events.append(data)
        elif not item.is_closed and not item.is_text:
            return (deltas.ItemPassthrough(Unknown(data), item.key),)
        return ()

    def _can_hold(self, data: bytes) -> bool:
        """Return True, and count the event, if one more can be held."""
        self._held_count += 1
        self._held_size += len(data)
        return self._held_count <= _MAX_HELD and self._held_size <= _MAX_HELD_SIZE

    # Responses

    def _read_response_started(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        response = wire.read_response(event.response)
        self._response_id = response.id if isinstance(response.id, str) else self._response_id
        self._note_model(response)
        return ()

    def _note_model(self, response: wire.UpstreamResponse) -> None:
        if self._served_model is not None:
            self._served_model.observe(response.model)

    def _read_response_ended(self, event: wire.UpstreamEvent) -> Sequence[Delta]:
        response = wire.read_response(event.response)
        name = event.type.removeprefix("response.")
        if name == "failed" or response.status not in ("failed", "incomplete", "cancelled"):
            response.status = "completed" if name == "done" else name
        return self._finish(response)

    def _finish(self, response: wire.UpstreamResponse) -> Sequence[Delta]:
        if response.status not in ("completed", "incomplete"):
            raise self._explain(response)
        self._note_model(response)
        output = response.list_output()
        if len(output) > self._limits.max_answer_items:
            raise self._limits.make_error("max_answer_items")
        if response.id is None and not output and not any(self._items):
            raise UpstreamError("The upstream ended its response without any output.")
        emitted = self._emit_rest(output, is_cut_off=response.status == "incomplete")
        usage = parse_usage(response.usage)
        if usage is None and self._estimate is not None:
            usage = self._estimate(output or self._done_items or [_encode_texts(self._items)])
        if usage is not None:
            emitted.append(deltas.TokenUsage(usage))
        emitted.append(self._find_finish(response))
        self.finished = True
        if self._on_completed is not None and response.status == "completed":
            response_id = response.id if isinstance(response.id, str) else self._response_id
            self._on_completed(response_id, output or self._done_items)
        return emitted

    def _emit_rest(self, output: list[Raw], *, is_cut_off: bool) -> list[Delta]:
        """Emit the items of the final list that the stream did not announce or did not finish."""
        emitted: list[Delta] = []
        all_fields = [wire.read_item(raw) for raw in output]
        if is_cut_off and all_fields:
            _mark_unfinished(all_fields[-1])
        known_items = self._items.match(all_fields)
        for position, (raw, fields, item) in enumerate(zip(output, all_fields, known_items, strict=True)):
            if (item is None or not item.is_closed) and not _is_late_seal(fields, known_items[position + 1 :]):
                emitted += self._finish_item(item, raw, fields)
        return emitted

    def _explain(self, response: wire.UpstreamResponse) -> Exception:
        if response.error:
            return map_error_payload({"error": response.error}, secrets=self._secrets)
        status = describe_value(response.status, self._secrets)
        return UpstreamError(f"The upstream ended its response with status '{status}' and no error.")

    def _find_finish(self, response: wire.UpstreamResponse) -> deltas.Finish:
        if response.status == "completed":
            return deltas.Finish()
        details = response.incomplete_details
        reason = details.get("reason") if isinstance(details, dict) else None
        if reason == "content_filter":
            return deltas.Finish("content_filter")
        return deltas.Finish("length", None if reason in _LENGTH_REASONS else describe_value(reason, self._secrets))

    def _ignore(self, _: wire.UpstreamEvent) -> Sequence[Delta]:
        return ()

    _HANDLERS: ClassVar[dict[str, Callable[["ResponsesReader", wire.UpstreamEvent], Sequence[Delta]]]] = {
        "response.output_text.delta": _read_text_delta,
        "response.created": _read_response_started,
        "response.queued": _read_response_started,
        "response.in_progress": _read_response_started,
        "response.completed": _read_response_ended,
        "response.incomplete": _read_response_ended,
        "response.failed": _read_response_ended,
        "response.cancelled": _read_response_ended,
        "response.done": _read_response_ended,
        "response.output_item.added": _read_item_added,
        "response.output_item.done": _read_item_done,
        "response.content_part.added": _ignore,
        "response.content_part.done": _read_part_done,
        "response.reasoning_part.added": _ignore,  # vLLM's names for parts of reasoning
        "response.reasoning_part.done": _read_part_done,
        "response.output_text.done": _read_text_done,
        "response.output_text.annotation.added": _read_annotation,
        "response.refusal.delta": _read_refusal_delta,
        "response.refusal.done": _read_refusal_done,
        "response.reasoning_text.delta": _read_reasoning_delta,
        "response.reasoning_text.done": _read_reasoning_done,
        "response.reasoning.delta": _read_reasoning_delta,
        "response.reasoning.done": _read_reasoning_done,
        "response.reasoning_summary_part.added": _ignore,
        "response.reasoning_summary_part.done": _read_summary_done,
        "response.reasoning_summary_text.delta": _read_summary_delta,
        "response.reasoning_summary_text.done": _read_summary_done,
        "response.reasoning_summary.delta": _read_summary_delta,
        "response.reasoning_summary.done": _read_summary_done,
        "response.function_call_arguments.delta": _read_arguments_delta,
        "response.function_call_arguments.done": _read_arguments_done,
        "response.custom_tool_call_input.delta": _read_input_delta,
        "response.custom_tool_call_input.done": _read_input_done,
    }


def _encode_texts(items: UpstreamItems) -> Raw:
    """Return the texts of items that were never sent whole."""
    return Raw(msgspec.json.encode({"content": [item.join_texts() for item in items]}))


def _mark_unfinished(fields: dict[str, Any]) -> None:
    """Mark the last item of an incomplete response as incomplete, unless the server has completed it."""
    kind = find_kind(fields.get("type"))
    has_no_arguments = kind == "function_call" and not fields.get("arguments")
    if kind in _STREAMED_KINDS and (fields.get("status") != "completed" or has_no_arguments):
        fields["status"] = "incomplete"


def _is_late_seal(fields: dict[str, Any], later: Sequence[UpstreamItem | None]) -> bool:
    """Return True for reasoning with only a seal to emit, if later items were emitted: the seal would be misplaced."""
    if fields.get("type") != "reasoning" or fields.get("summary") or fields.get("content"):
        return False
    return any(item is not None for item in later)
