"""Names of events: those of OpenAI's API, or where the two differ, those of Open Responses."""

from collections.abc import Callable, Mapping, Sequence

from antiphon.config import Dialect
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.events import Event, ReasoningDelta, ReasoningDone, ReasoningTextDelta, ReasoningTextDone
from antiphon.protocol.unions import Unknown

Batch = Sequence[Event | Unknown]

HEADER = b"x-antiphon-compat"
_DIALECTS: dict[bytes, Dialect] = {b"openai": "openai", b"open-responses": "open-responses"}


def choose_names(headers: Mapping[bytes, bytes], default: Dialect) -> Callable[[Batch], Batch]:
    """What gives events the names that a request wants, or else the server's."""
    asked = headers.get(HEADER)
    dialect = default if asked is None else _DIALECTS.get(asked.strip().lower())
    if dialect is None:
        known = ", ".join(name.decode() for name in _DIALECTS)
        raise InvalidRequest(f"The header {HEADER.decode()} must be one of: {known}.", code="invalid_header")
    return _keep if dialect == "openai" else _rename_all


def _keep(batch: Batch) -> Batch:
    return batch


def _rename_all(batch: Batch) -> Batch:
    return [_rename(event) for event in batch]


def _rename(event: Event | Unknown) -> Event | Unknown:
    if event.type not in _NAMES:
        return event
    # What comes out of the event log has not been read into a struct.
    read = codec.decode_event(event.raw) if isinstance(event, Unknown) else event
    if isinstance(read, ReasoningTextDelta):
        return ReasoningDelta(read.sequence_number, read.item_id, read.output_index, read.content_index, read.delta)
    if isinstance(read, ReasoningTextDone):
        return ReasoningDone(read.sequence_number, read.item_id, read.output_index, read.content_index, read.text)
    return event


_NAMES = frozenset({"response.reasoning_text.delta", "response.reasoning_text.done"})
