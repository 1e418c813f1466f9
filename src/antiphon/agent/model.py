"""One turn of the model, from the run's state to its answer."""

import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Literal, Protocol

import msgspec

from antiphon.agent.answer import Answer, Remark, Spoken, Turn, Waste, hear, make_answer, read_usage
from antiphon.agent.entries import JsonObject
from antiphon.agent.estimate import estimate_usage
from antiphon.agent.gathering import Gathering
from antiphon.agent.history import is_hollow, mend, since_compaction
from antiphon.agent.provider import is_forgetful
from antiphon.agent.sealing import LOST, SEALED, Sealing, cannot_open, is_sealed, refuses_to_seal, unseal
from antiphon.agent.state import State
from antiphon.agent.transport import Transport
from antiphon.errors import AntiphonError, ServerError, UpstreamError
from antiphon.protocol.response import Usage

logger = logging.getLogger(__name__)

Waiver = Literal["state", "seal", "sealed"]
"""What a turn does without if the server does not take it: continuing a response, asking for seals, sending sealed
content.
"""


class Model(Protocol):
    """Takes turns. Everything it says comes first, and its answer last. Closing the turn stops the model."""

    def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn: ...


class _Attempt:
    """One request, and what has come of it so far. `read` is all that the model reads for it."""

    def __init__(self, request: JsonObject, read: Sequence[JsonObject]) -> None:
        self.request = request
        self.said: list[str] = []
        self.is_ignored = False
        """Whether the server has answered without knowing what it should have continued."""
        self._read = read
        self._gathering = Gathering()

    async def listen(self, transport: Transport) -> AsyncGenerator[Spoken, None]:
        async with aclosing(await transport.stream(self.request)) as events:
            async for batch in events:
                self._gathering.feed(batch)
                for spoken in filter(None, map(hear, batch)):
                    self.said.append(spoken.text)
                    yield spoken

    def finish(self) -> Answer:
        """The answer. Raises if there is none, or one that does not continue what it should."""
        response = self._gathering.finish()
        previous = self.request.get("previous_response_id")
        # Servers say what they have continued.
        self.is_ignored = previous is not None and response.get("previous_response_id") != previous
        if self.is_ignored:
            raise UpstreamError("The server has not continued the conversation. It is sent whole from now on.")
        answer = make_answer(response)
        if answer.usage.total_tokens:
            return answer
        return msgspec.structs.replace(answer, usage=estimate_usage(self.request, self._read, answer.output))

    def measure_waste(self) -> Usage:
        """What it took if it failed: as the server says, or else about, if the model had begun to answer."""
        counted = read_usage((self._gathering.response or {}).get("usage"))
        heard = self._gathering.items or ([{"content": "".join(self.said)}] if self.said else [])
        return estimate_usage(self.request, self._read, heard) if heard and not counted.total_tokens else counted


class ResponsesModel:
    """A model behind a transport of the Responses API.

    `settings` are the parameters of every request. `state` is where the conversation is kept between the turns: with
    the "client", which sends it whole each time, or on the "server", as long as that remembers it. `sealing` is what
    all who ask this model know of it.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        settings: JsonObject,
        tools: Sequence[JsonObject],
        state: Literal["client", "server"] = "client",
        sealing: Sealing | None = None,
    ) -> None:
        self._transport = transport
        self._tools = [*settings.get("tools", ()), *tools]
        self._include = _choose_includes(settings)
        self._settings = {name: value for name, value in settings.items() if name != "include"}
        self._state = state
        self._sealing = sealing or Sealing()

    async def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn:
        waived: set[Waiver] = set()
        answer: Answer | None = None
        while answer is None:
            attempt = self._prepare(state, told, waived, use_tools=use_tools)
            try:
                async with aclosing(attempt.listen(self._transport)) as speech:
                    async for spoken in speech:
                        yield spoken
                answer = attempt.finish()
            except AntiphonError as error:
                wasted = attempt.measure_waste()
                if wasted.total_tokens:
                    yield Waste(wasted)
                waiver = self._give_way(attempt, error)
                if waiver is None or waiver in waived:
                    raise
                waived.add(waiver)
                if waiver == "sealed":
                    yield Remark(LOST)
            except AssertionError:
                # What a test claims about a request must fail the test, and not only the run.
                raise
            except Exception as error:
                raise as_failure(error) from error
        self._sealing.refused |= "seal" in waived
        yield msgspec.structs.replace(answer, unsealed="sealed" in waived)

    def _prepare(
        self, state: State, told: Sequence[JsonObject], waived: Collection[Waiver], *, use_tools: bool
    ) -> _Attempt:
        request = self._settings | {"store": self._state == "server"}
        seals = not self._sealing.refused and "seal" not in waived
        include = [each for each in self._include if seals or each != SEALED]
        if include:
            request["include"] = include
        if self._tools:
            request["tools"] = self._tools
            if not use_tools:
                request["tool_choice"] = "none"
        if self._state == "server" and state.response_id is not None:
            fresh = [*state.history[state.sent :], *told]
            request |= {"previous_response_id": state.response_id, "input": fresh}
            return _Attempt(request, [*state.history, *told])
        whole = mend(since_compaction(unseal(state.history) if "sealed" in waived else state.history))
        items = [*(item for item in whole if not is_hollow(item)), *told]
        return _Attempt(request | {"input": items}, items)

    def _give_way(self, attempt: _Attempt, error: AntiphonError) -> Waiver | None:
        """What the server would not take, if it would have answered without."""
        waiver = None if attempt.said else _find_waiver(attempt.request, error)
        if waiver == "state" or attempt.is_ignored:
            self._state = "client"
        return waiver


def _choose_includes(settings: JsonObject) -> list[str]:
    """What the settings include, and sealed reasoning, which goes back with what it led to. An empty list is none."""
    given = settings.get("include", ())
    return list(dict.fromkeys([*given, SEALED])) if given or "include" not in settings else []


def _find_waiver(request: JsonObject, error: AntiphonError) -> Waiver | None:
    if SEALED in request.get("include", ()) and refuses_to_seal(error):
        return "seal"
    if cannot_open(error) and any(map(is_sealed, request["input"])):
        return "sealed"
    if "previous_response_id" in request and (is_forgetful(error) or cannot_open(error)):
        return "state"
    return None


def as_failure(error: Exception) -> ServerError:
    """What nobody has thought of, in the ways to a model or in what that says, ends a turn as any error does."""
    logger.error("the turn failed", exc_info=error)
    return ServerError(f"The turn failed: {type(error).__name__}. The log says more.")
