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

# Number of events between two checks of the composer. An answer with fewer events is not checked at all.
_CHECK_INTERVAL = 512
# Size of a large event. With small limits the first check is earlier.
_LARGE_EVENT = 4096
# A log probability in memory, with its token and its bytes.
_LOGPROB_SIZE = 128

Limit = Literal["max_answer_bytes", "max_answer_text_bytes", "max_answer_items", "max_answer_events"]


class AnswerLimits(msgspec.Struct, frozen=True):
    """The limits of one answer. Each has the name of its setting.

    Text has a lower limit than the whole answer, which may contain images: five events repeat the whole text.
    `first_check` is derived: the event count of the first check.
    """

    max_answer_bytes: int = 64 * 1024 * 1024
    max_answer_text_bytes: int = 8 * 1024 * 1024
    max_answer_items: int = 2048
    max_answer_events: int = 1_000_000
    first_check: int = 0

    def __post_init__(self) -> None:
        size = min(self.max_answer_bytes, self.max_answer_text_bytes)
        first = min(_CHECK_INTERVAL, size // _LARGE_EVENT + 1, self.max_answer_events + 1)
        msgspec.structs.force_setattr(self, "first_check", first)  # once, not for every answer

    def check(self, size: int, text_size: int, item_count: int, event_count: int) -> tuple[UpstreamError | None, int]:
        """Return the error for an answer of this size, if it exceeds a limit, and the event count of the next check.

        `size` is without the text. The next check is soon if the text of the events is large, or near the limit.
        """
        if size + text_size > self.max_answer_bytes:
            return self.make_error("max_answer_bytes"), 0
        if text_size > self.max_answer_text_bytes:
            return self.make_error("max_answer_text_bytes"), 0
        if item_count > self.max_answer_items:
            return self.make_error("max_answer_items"), 0
        if event_count > self.max_answer_events:
            return self.make_error("max_answer_events"), 0
        left = min(self.max_answer_bytes - size, self.max_answer_text_bytes) - text_size
        events_left = left * event_count // (4 * text_size + 1)  # if they are up to four times as large
        return None, min(event_count + min(events_left, _CHECK_INTERVAL) + 1, self.max_answer_events + 1)

    def make_error(self, exceeded: Limit) -> UpstreamError:
        """Return the error for an answer that exceeds a limit."""
        return UpstreamError(
            f"The answer was cut off: it exceeds the limit of {getattr(self, exceeded)} {_UNITS[exceeded]} "
            f"(setting '{exceeded}').",
            code=ANSWER_TOO_LARGE,
        )


_UNITS: dict[Limit, str] = {
    "max_answer_bytes": "bytes",
    "max_answer_text_bytes": "bytes of text",
    "max_answer_items": "output items",
    "max_answer_events": "events",
}


def measure_delta(delta: Delta) -> int:
    """Return the size of a delta whose type is in `MEASURED`, in bytes. Invalid content has no size."""
    try:
        return _MEASURES[type(delta)](delta)
    except (TypeError, AttributeError):  # the draft of the item reports it
        return 0


def _measure_logprobs(delta: deltas.Text) -> int:
    if not delta.logprobs:
        return 0
    return _LOGPROB_SIZE * sum(1 + len(each.top_logprobs) for each in delta.logprobs)


def _measure_close(delta: deltas.CloseItem) -> int:
    return 0 if delta.item is None else len(codec.encode(delta.item))


_MEASURES: dict[type, Callable[[Any], int]] = {
    deltas.Text: _measure_logprobs,
    deltas.Annotate: lambda delta: len(codec.encode(delta.annotation)),
    deltas.ReasoningSeal: lambda delta: len(delta.encrypted_content),
    deltas.WholeItem: lambda delta: len(codec.encode(delta.item)),
    deltas.Amend: lambda delta: sum(map(len, map(bytes, delta.fields.values()))),
    deltas.OpenItem: lambda delta: len(codec.encode(delta.item)),
    deltas.ItemPassthrough: lambda delta: len(delta.event.raw),
    deltas.CloseItem: _measure_close,
    deltas.Passthrough: lambda delta: len(delta.event.raw),
}

MEASURED = frozenset(_MEASURES)
"""The types of deltas that add more than text to an item. Drafts count the text."""
