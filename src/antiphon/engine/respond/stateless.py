"""Serving without state: every request brings its whole history, and nothing of it is kept.

What cannot work so is refused, with the way to do without it. What has no effect so is accepted, left aside and told.
"""

from collections.abc import Sequence

import msgspec

from antiphon.engine.respond.run import Run
from antiphon.errors import UnsupportedParameter
from antiphon.protocol import events
from antiphon.protocol.events import Event
from antiphon.protocol.items import ItemReference, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

_IGNORED = ("store", "include", "background", "prompt_cache_key", "service_tier")
# Asking for what happens anyway is no disappointment.
_HARMLESS: dict[str, object] = {"store": False, "include": [], "background": False}


def leave_state_aside(request: CreateRequest, *, remembers: bool) -> tuple[CreateRequest, list[str]]:
    """The request as one that stands alone, and a warning about what was left aside. Raises on what needs state.

    Only what its connection `remembers` can be continued.
    """
    _refuse_state(request, remembers=remembers)
    ignored = [name for name in _IGNORED if getattr(request, name) not in (None, _HARMLESS.get(name))]
    if request.reasoning is not None:
        ignored += [f"reasoning.{name}" for name, value in msgspec.structs.asdict(request.reasoning).items() if value]
    blank = dict.fromkeys((*_IGNORED, "reasoning")) | {"store": False}
    warnings = [f"ignored: {', '.join(ignored)}"] if ignored else []
    return msgspec.structs.replace(request, **blank), warnings


def _refuse_state(request: CreateRequest, *, remembers: bool) -> None:
    for name in ("conversation", "prompt") if remembers else ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise _unsupported(name, param=name)
    for index, item in enumerate(request.input or ()):
        if isinstance(item, ItemReference):
            raise _unsupported("item_reference", param=f"input[{index}]")


def _unsupported(name: str, *, param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{name} is not supported. This server keeps no state between requests. "
        "Please send full conversation history in the input array.",
        param=param,
    )


class StatelessRun(Run):
    """A run that shows neither reasoning nor annotations, and whose failure takes back what was said before it."""

    def _tell(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        told = super()._tell([delta for delta in batch if not _is_hidden(delta)])
        if told and isinstance(told[-1], events.Failed):
            told[-2:] = self._take_back(told[-1])
        return told

    def _take_back(self, failed: events.Failed) -> tuple[Event, Event]:
        """The two events of a failure, with the one code that there is for it."""
        error = failed.response.error
        assert error is not None
        error = msgspec.structs.replace(error, code="server_error")
        self._composer.response = msgspec.structs.replace(failed.response, output=[], usage=None, error=error)
        payload = events.ErrorPayload(error.type or "server_error", error.code, error.message, error.param)
        return (
            events.Error(failed.sequence_number - 1, payload),
            events.Failed(failed.sequence_number, self._composer.response),
        )


def _is_hidden(delta: Delta) -> bool:
    if isinstance(delta, deltas.WholeItem):
        return isinstance(delta.item, Reasoning)
    return isinstance(delta, deltas.Reasoning | deltas.ReasoningSummary | deltas.ReasoningSeal | deltas.Annotate)
