"""Event-name dialects: the names of OpenAI's API, or those of Open Responses where the two differ."""

from collections.abc import Callable, Mapping, Sequence

from antiphon.config import Dialect
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.events import Event, ReasoningDelta, ReasoningDone, ReasoningTextDelta, ReasoningTextDone
from antiphon.protocol.unions import Unknown

Batch = Sequence[Event | Unknown]

HEADER = b"x-antiphon-compat"
_DIALECTS: dict[bytes, Dialect] = {b"openai": "openai", b"open-responses": "open-responses"}
_RENAMED_TYPES = frozenset({"response.reasoning_text.delta", "response.reasoning_text.done"})


def choose_event_names(headers: Mapping[bytes, bytes], default: Dialect) -> Callable[[Batch], Batch]:
    """Choose the event-name dialect for a request. Return a function that renames a batch of events."""
    requested = headers.get(HEADER)
    dialect = default if requested is None else _DIALECTS.get(requested.strip().lower())
    if dialect is None:
        known = ", ".join(name.decode() for name in _DIALECTS)
        raise InvalidRequest(f"The header {HEADER.decode()} must be one of: {known}.", code="invalid_header")
    return _pass_unchanged if dialect == "openai" else _rename_batch


def _pass_unchanged(batch: Batch) -> Batch:
    return batch


def _rename_batch(batch: Batch) -> Batch:
    return [_rename(event) for event in batch]


def _rename(event: Event | Unknown) -> Event | Unknown:
    if event.type not in _RENAMED_TYPES:
        return event
    # Events from the event log are not decoded.
    decoded = codec.decode_event(event.raw) if isinstance(event, Unknown) else event
    if isinstance(decoded, ReasoningTextDelta):
        return ReasoningDelta(
            decoded.sequence_number, decoded.item_id, decoded.output_index, decoded.content_index, decoded.delta
        )
    if isinstance(decoded, ReasoningTextDone):
        return ReasoningDone(
            decoded.sequence_number, decoded.item_id, decoded.output_index, decoded.content_index, decoded.text
        )
    return event
