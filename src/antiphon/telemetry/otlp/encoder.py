"""The interface of the encoders of spans."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from antiphon.telemetry.otlp.frame import SpanFrame
from antiphon.telemetry.otlp.span import OtlpSpan, SpanRecord, TracerScope

logger = logging.getLogger(__name__)


class EncodedPart(NamedTuple):
    """One or several encoded spans. `pieces` can be read once. `size` is their length in bytes."""

    pieces: Iterable[bytes]
    size: int


EncodedSpans = dict[TracerScope, list[EncodedPart]]
"""Encoded spans by their scope."""


class SpanEncoder(Protocol):
    content_type: str

    def encode_records(self, frame: SpanFrame, records: Sequence[SpanRecord]) -> list[EncodedPart]:
        """Return the spans of a frame. A span that cannot be encoded is left out."""

    def encode_spans(self, spans: Sequence[OtlpSpan]) -> list[EncodedPart]:
        """Return the spans. A span that cannot be encoded is left out."""

    def join_spans(self, encoded: EncodedSpans) -> bytes:
        """Return the request to the collector for encoded spans."""


def encode_each(encode: Callable[[OtlpSpan], bytes], spans: Iterable[OtlpSpan]) -> list[EncodedPart]:
    """Return spans that are encoded one by one. A span that cannot be encoded is left out."""
    parts: list[EncodedPart] = []
    for span in spans:
        try:
            encoded = encode(span)
        except Exception:  # such as a start time below zero
            logger.warning("a span could not be encoded", exc_info=True)
        else:
            parts.append(EncodedPart((encoded,), len(encoded)))
    return parts
