"""One turn of the model, from the run's state to its answer."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from antiphon.agent.gathering import Gathering
from antiphon.agent.journal import State
from antiphon.agent.provider import is_forgetful, replayable
from antiphon.agent.transport import Events, Transport
from antiphon.errors import AntiphonError
from antiphon.protocol.events import (
    Event,
    OutputTextDelta,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
)
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import Usage

JsonObject = dict[str, Any]


class Spoken(Struct, frozen=True):
    """A piece of what the model says while it says it."""

    kind: Literal["text", "reasoning"]
    text: str


class Answer(Struct, frozen=True):
    """A whole turn: its output as items that can be sent back."""

    response_id: str
    output: list[JsonObject]
    usage: Usage


Turn = AsyncGenerator["Spoken | Answer", None]


class Model(Protocol):
    """Takes turns. Everything it says comes first, and its answer last. Closing the turn stops the model."""

    def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn: ...


class ResponsesModel:
    """A model behind a transport of the Responses API.

    `settings` are the parameters of every request. `state` is where the conversation is kept between the turns: with
    the "client", which sends it whole each time, or on the "server", as long as that remembers it.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        settings: JsonObject,
        tools: Sequence[JsonObject],
        state: Literal["client", "server"] = "client",
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._tools = list(tools)
        self._state = state

    async def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn:
        gathering = Gathering()
        async with aclosing(await self._ask(state, told, use_tools=use_tools)) as events:
            async for batch in events:
                gathering.feed(batch)
                for event in batch:
                    spoken = hear(event)
                    if spoken is not None:
                        yield spoken
        yield make_answer(gathering.finish())

    async def _ask(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Events:
        request = dict(self._settings)
        if self._tools:
            request["tools"] = self._tools
            if not use_tools:
                request["tool_choice"] = "none"
        if self._state == "server":
            chained = request | {"store": True, "input": [*state.history, *told]}
            if state.response_id is not None:
                fresh = state.history[state.sent :]
                chained |= {"previous_response_id": state.response_id, "input": [*fresh, *told]}
            try:
                return await self._transport.stream(chained)
            except AntiphonError as error:
                if state.response_id is None or not is_forgetful(error):
                    raise
                self._state = "client"
        request |= {"store": False, "include": ["reasoning.encrypted_content"], "input": [*state.history, *told]}
        return await self._transport.stream(request)


def hear(event: Event | Unknown) -> Spoken | None:
    """What an event lets the model say, if it does."""
    if isinstance(event, OutputTextDelta):
        return Spoken("text", event.delta)
    if isinstance(event, ReasoningTextDelta | ReasoningSummaryTextDelta):
        return Spoken("reasoning", event.delta)
    return None


def make_answer(response: JsonObject) -> Answer:
    """The answer in a response. A call that was cut off cannot be made, nor shown to the model again."""
    output = [
        replayable(item)
        for item in response["output"]
        if not (item.get("type") == "function_call" and item.get("status") == "incomplete")
    ]
    return Answer(str(response.get("id") or ""), output, _read_usage(response.get("usage")))


def _read_usage(usage: Any) -> Usage:
    try:
        return msgspec.convert(usage, Usage)
    except msgspec.ValidationError:
        return Usage(0, 0, 0)
