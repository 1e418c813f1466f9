"""Limits on one answer of a model.

Two passes count against them. `upstream.delta_stream` counts the bytes and events of another server as they arrive,
also those that no client sees. The composer counts the content, items and events of every answer.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from antiphon.errors import UpstreamError
from antiphon.protocol import codec
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

ANSWER_TOO_LARGE = "answer_too_large"
"""The error code of an answer that exceeds a limit."""

# A log probability in memory, with its token and its bytes.
_LOGPROB_SIZE = 128

Limit = Literal["max_answer_bytes", "max_answer_items", "max_answer_events"]


class AnswerLimits(msgspec.Struct, frozen=True):
    """The limits of one answer. Each has the name of its setting."""

    max_answer_bytes: int = 64 * 1024 * 1024
    max_answer_items: int = 2048
    max_answer_events: int = 1_000_000

    def make_error_for(self, size: int, event_count: int) -> UpstreamError:
        """Return the error for an answer of this size. If it does not exceed these limits, it has too many items."""
        if size > self.max_answer_bytes:
            return self.make_error("max_answer_bytes")
        return self.make_error("max_answer_events" if event_count > self.max_answer_events else "max_answer_items")

    def make_error(self, exceeded: Limit) -> UpstreamError:
        """Return the error for an answer that exceeds a limit."""
        return UpstreamError(
            f"The answer was cut off: it exceeds the limit of {getattr(self, exceeded)} {_UNITS[exceeded]} "
            f"(setting '{exceeded}').",
            code=ANSWER_TOO_LARGE,
        )


_UNITS: dict[Limit, str] = {
    "max_answer_bytes": "bytes",
    "max_answer_items": "output items",
    "max_answer_events": "events",
}


def measure_delta(delta: Delta) -> int:
    """Return the size of a delta's content, in bytes. A character counts as one byte. Invalid content has no size."""
    measure = _MEASURES.get(type(delta))
    if measure is None:
        return 0
    try:
        return measure(delta)
    except (TypeError, AttributeError):  # the draft of the item reports it
        return 0


def _measure_text(delta: deltas.Text) -> int:
    if not delta.logprobs:
        return len(delta.text)
    return len(delta.text) + _LOGPROB_SIZE * sum(1 + len(each.top_logprobs) for each in delta.logprobs)


def _measure_close(delta: deltas.CloseItem) -> int:
    return 0 if delta.item is None else len(codec.encode(delta.item))


_MEASURES: dict[type, Callable[[Any], int]] = {
    deltas.Text: _measure_text,
    deltas.Annotate: lambda delta: len(codec.encode(delta.annotation)),
    deltas.Refusal: lambda delta: len(delta.text),
    deltas.Reasoning: lambda delta: len(delta.text),
    deltas.ReasoningSummary: lambda delta: len(delta.text),
    deltas.ReasoningSeal: lambda delta: len(delta.encrypted_content),
    deltas.ToolCall: lambda delta: len(delta.arguments) + len(delta.name),
    deltas.CustomToolCall: lambda delta: len(delta.input) + len(delta.name),
    deltas.WholeItem: lambda delta: len(codec.encode(delta.item)),
    deltas.Amend: lambda delta: sum(map(len, map(bytes, delta.fields.values()))),
    deltas.OpenItem: lambda delta: len(codec.encode(delta.item)),
    deltas.ItemPassthrough: lambda delta: len(delta.event.raw),
    deltas.CloseItem: _measure_close,
    deltas.Passthrough: lambda delta: len(delta.event.raw),
}
