"""Stateless serving: every request brings its whole history, and nothing is stored.

Parameters that need state are refused. Parameters without effect are ignored, with a warning.
"""

from collections.abc import Sequence

import msgspec

from antiphon.engine.respond.run import Run
from antiphon.errors import UnsupportedParameter
from antiphon.protocol import events
from antiphon.protocol.content import OutputText
from antiphon.protocol.events import Event
from antiphon.protocol.items import ItemReference, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

_IGNORED = ("store", "include", "background", "prompt_cache_key", "service_tier")
# Values that match the stateless behaviour need no warning.
_HARMLESS: dict[str, object] = {"store": False, "include": [], "background": False}


def remove_state(request: CreateRequest, *, has_memory: bool) -> tuple[CreateRequest, list[str]]:
    """Return the request without the parameters that need state, and a warning that names them.

    Raises UnsupportedParameter for a parameter that cannot be ignored. With the memory of a connection, its responses
    can be continued.
    """
    _refuse_state(request, has_memory=has_memory)
    ignored = [name for name in _IGNORED if getattr(request, name) not in (None, _HARMLESS.get(name))]
    if request.reasoning is not None:
        ignored += [f"reasoning.{name}" for name, value in msgspec.structs.asdict(request.reasoning).items() if value]
    blank = dict.fromkeys((*_IGNORED, "reasoning")) | {"store": False}
    warnings = [f"ignored: {', '.join(ignored)}"] if ignored else []
    return msgspec.structs.replace(request, **blank), warnings


def _refuse_state(request: CreateRequest, *, has_memory: bool) -> None:
    for name in ("conversation", "prompt") if has_memory else ("previous_response_id", "conversation", "prompt"):
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
    """A run without reasoning, annotations and empty logprobs. A failed response has no output and no usage."""

    async def drain(self) -> Response:
        async for _ in self.events():  # `_compose` needs all events
            pass
        return self.response

    def _compose(self, batch: Sequence[Delta]) -> list[Event | Unknown]:
        composed = super()._compose([delta for delta in batch if not _is_hidden(delta)])
        for event in composed:
            if isinstance(event, events.ContentPartEvent) and isinstance(event.part, OutputText):
                # The part is also that of the item and of the response.
                event.part.logprobs = event.part.logprobs or None
        if composed and isinstance(composed[-1], events.Failed):
            composed[-2:] = self._clear_output(composed[-1])
        return composed

    def _clear_output(self, failed: events.Failed) -> tuple[Event, Event]:
        """Return the two events of a failure, without output and with the code `server_error`."""
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
