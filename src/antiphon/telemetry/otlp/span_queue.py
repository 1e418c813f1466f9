"""The spans that wait for their export, and the thread that exports them."""

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from opentelemetry.sdk.resources import Resource

from antiphon.telemetry.environment import read_otlp_variable, read_variable
from antiphon.telemetry.log_limit import LogLimit
from antiphon.telemetry.otlp.encoder import EncodedSpans, SpanEncoder
from antiphon.telemetry.otlp.json_encoder import JsonEncoder
from antiphon.telemetry.otlp.protobuf import ProtobufEncoder
from antiphon.telemetry.otlp.sender import OtlpSender
from antiphon.telemetry.otlp.span import OtlpSpan, SpanDetails, SpanEvent, SpanRecord, TracerScope

logger = logging.getLogger(__name__)

# Spans with the text of prompts can be large. Collectors limit the size of a request.
_MAX_PAYLOAD_BYTES = 8 << 20
# A record has at most a few kilobytes.
_MAX_RECORDS = 512

_get_frame = itemgetter(0)


class SpanQueue:
    """A bounded queue of spans that have ended. `add` can be called in all threads.

    `records` are the waiting spans. After a span is added, `handle_alert` must be called if there are `alert_size`
    records or more.

    The variables OTEL_BSP_* give its size, the size of a batch, and the time that a span waits. Raises ValueError if
    one of them is not valid.
    """

    def __init__(self, make_resource: Callable[[], Resource], user_agent: str) -> None:
        self._max_size = _read_number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._batch_size = _read_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(512, self._max_size))
        self._delay = _read_number("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        if self._batch_size > self._max_size:
            raise ValueError("OTEL_BSP_MAX_EXPORT_BATCH_SIZE must not be above OTEL_BSP_MAX_QUEUE_SIZE")
        self._make_resource = make_resource
        self._encoder: SpanEncoder | None = self._make_encoder()
        self._sender = OtlpSender(self._encoder.content_type, user_agent)
        self.records: list[SpanRecord] = []
        self._dropped = 0
        self._log_limit = LogLimit()
        self._is_closed = False
        self._make_locks()

    def add(self, record: SpanRecord) -> None:
        """Queue a span that has ended. If the queue is full, or closed, the span is dropped."""
        records = self.records
        records.append(record)
        if len(records) >= self.alert_size:
            self.handle_alert()

    def handle_alert(self) -> None:
        """Handle a new span if there is a full batch, if the thread does not run, or if the queue is closed."""
        size = len(self.records)
        if size > self._max_size or self._is_closed:
            self._drop_newest()
            return
        if size >= self._batch_size and not self._wake.is_set():  # `set` takes much longer
            self._wake.set()
        if self._thread is None:
            self._start()

    def flush(self, seconds: float) -> bool:
        """Export all spans in the queue. Return False if that was not possible in time."""
        deadline = time.monotonic() + seconds
        if not self._exporting.acquire(timeout=seconds):
            return False
        try:
            while self.records:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._export_batch(remaining):
                    return False
        finally:
            self._exporting.release()
        return True

    def close(self, seconds: float) -> None:
        """Export the last spans, within this time, and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self.alert_size = 0
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)
        self._sender.close()

    def reset(self) -> None:
        """Start again in a child process. The spans in the queue belong to the parent process."""
        self.records.clear()
        self._encoder = None
        self._sender.reset()
        self._make_locks()

    def _make_locks(self) -> None:
        self._exporting = threading.Lock()
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.alert_size = 0  # until the thread runs

    def _start(self) -> None:
        """Start the thread. A process that records no span, such as the child of a fork, has none."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="antiphon-span-export", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads: the next span tries again
                    if self._log_limit.is_due():
                        logger.warning("the thread that exports spans could not be started: %s", error)
                else:
                    self._thread = thread
                    self.alert_size = self._batch_size

    def _run(self) -> None:
        while not self._is_closed:
            is_full = self._wake.wait(self._delay)
            self._wake.clear()
            # Complete batches are exported at once. The others wait for the delay.
            self._export(min_size=self._batch_size if is_full and not self._is_closed else 1)
        self._export(min_size=1)

    def _export(self, *, min_size: int) -> None:
        with self._exporting:
            while len(self.records) >= min_size:
                try:
                    self._export_batch()
                except Exception:
                    logger.exception("spans could not be exported")

    def _export_batch(self, seconds: float = math.inf) -> bool:
        """Export the oldest spans. Return False if the collector did not get them."""
        records = self.records
        batch = records[: self._batch_size]
        del records[: len(batch)]  # other threads only append, or remove newer ones
        if self._encoder is None:
            self._encoder = self._make_encoder()
        deadline = time.monotonic() + seconds
        is_sent = True
        for payload in _encode_batch(self._encoder, batch):
            is_sent &= self._sender.send(payload, deadline - time.monotonic())
        return is_sent

    def _make_encoder(self) -> SpanEncoder:
        resource = self._make_resource()
        is_json = read_otlp_variable("PROTOCOL").lower() == "http/json"
        return (JsonEncoder if is_json else ProtobufEncoder)(resource.attributes, resource.schema_url)

    def _drop_newest(self) -> None:
        if self._is_closed and (self._thread is None or not self._thread.is_alive()):
            self.records.clear()
        elif self._is_closed:  # the last batches are still exported
            with suppress(IndexError):
                self.records.pop()
        else:
            self._dropped += max(0, len(self.records) - self._max_size)
            del self.records[self._max_size :]
        if not self._is_closed and self._log_limit.is_due():
            logger.warning(
                "%d spans were dropped: the queue is full (OTEL_BSP_MAX_QUEUE_SIZE, %d)", self._dropped, self._max_size
            )
            self._dropped = 0


def _encode_batch(encoder: SpanEncoder, batch: Sequence[SpanRecord]) -> Iterator[bytes]:
    """Yield payloads of at most 8 MB, unless one span is larger. A span that cannot be encoded is left out."""
    records = _group_by_frame(batch)
    spans = [span for _, span in records.pop(None, ())]
    encoded: EncodedSpans = {}
    for frame, found in records.items():
        for first in range(0, len(found), _MAX_RECORDS):
            parts = encoder.encode_records(frame, found[first : first + _MAX_RECORDS])
            encoded.setdefault(found[0][1].scope, []).extend(parts)
    for part in _split_spans(spans):
        for scope, group in _group_by_scope(part).items():
            encoded.setdefault(scope, []).extend(encoder.encode_spans(group))
        yield from _join_spans(encoder, encoded)
        encoded = {}
    yield from _join_spans(encoder, encoded)


def _group_by_frame(batch: Sequence[SpanRecord]) -> dict[Any, list[SpanRecord]]:
    """Return the records by their frame, or by None if they have no frame. The loop over the records is in C."""
    groups: defaultdict[Any, list[SpanRecord]] = defaultdict(list)
    group_of_each = map(groups.__getitem__, map(_get_frame, batch))
    deque(map(list.append, group_of_each, batch), maxlen=0)
    return groups


def _split_spans(spans: Sequence[OtlpSpan]) -> Iterator[Sequence[OtlpSpan]]:
    """Yield parts that can be encoded at once. Spans can have long texts."""
    first = size = 0
    for index, span in enumerate(spans):
        added = _estimate_size(span)
        if size and size + added > _MAX_PAYLOAD_BYTES:
            yield spans[first:index]
            first, size = index, 0
        size += added
    if spans:
        yield spans[first:]


def _group_by_scope(spans: Sequence[OtlpSpan]) -> dict[TracerScope, list[OtlpSpan]]:
    groups: dict[TracerScope, list[OtlpSpan]] = {}
    for span in spans:
        groups.setdefault(span.tracer.scope, []).append(span)
    return groups


def _estimate_size(span: OtlpSpan) -> int:
    """Return the number of characters in the texts of a span that can be long."""
    details = span.details
    if details is None:
        return 0
    holders: tuple[SpanDetails | SpanEvent, ...] = (details, *details.events)
    texts = [value for holder in holders for value in holder.attributes.values() if isinstance(value, str)]
    return len(details.status_message or "") + sum(map(len, texts))


def _join_spans(encoder: SpanEncoder, encoded: EncodedSpans) -> Iterator[bytes]:
    """Yield the payloads of encoded spans."""
    joined: EncodedSpans = {}
    size = 0
    for scope, part in ((scope, part) for scope, parts in encoded.items() for part in parts):
        if size and size + part.size > _MAX_PAYLOAD_BYTES:
            yield encoder.join_spans(joined)
            joined, size = {}, 0
        joined.setdefault(scope, []).append(part)
        size += part.size
    if joined:
        yield encoder.join_spans(joined)


def _read_number(name: str, default: int) -> int:
    """Return a positive number. Text that is no number is a warning, as in the SDK."""
    text = read_variable(name)
    try:
        number = int(text) if text else default
    except ValueError:
        logger.warning("%s: %r is not a number; using %d", name, text, default)
        return default
    if number <= 0:
        raise ValueError(f"{name} must be a positive number, not {number}")
    return number
