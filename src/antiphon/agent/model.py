"""One turn of the model, from the run's state to its answer."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from antiphon.agent.entries import JsonObject
from antiphon.agent.gathering import Gathering
from antiphon.agent.history import OUTPUTS, drop_lone_reasoning, is_hollow, replayable, since_compaction
from antiphon.agent.provider import is_forgetful
from antiphon.agent.state import State
from antiphon.agent.transport import Transport
from antiphon.errors import AntiphonError, ServerError, UpstreamError
from antiphon.protocol.events import (
    Event,
    OutputTextDelta,
    ReasoningSummaryTextDelta,
    ReasoningTextDelta,
)
from antiphon.protocol.json_text import read_json
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage

logger = logging.getLogger(__name__)

_SEALED = "reasoning.encrypted_content"


class Spoken(Struct, frozen=True):
    """A piece of what the model says while it says it."""

    kind: Literal["text", "reasoning"]
    text: str


class Answer(Struct, frozen=True):
    """A whole turn: its output as items that can be sent back. `cut` is why it was cut off, if it was.

    `continues` says whether the server that gave it can go on from it: not if its output had to be put in order.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    cut: str = ""
    continues: bool = True


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
        self._tools = [*settings.get("tools", ()), *tools]
        self._include = list(dict.fromkeys([*settings.get("include", ()), _SEALED]))
        self._settings = settings
        self._state = state

    async def take_turn(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> Turn:
        heard = False
        answer: Answer | None = None
        while answer is None:
            request = self._make_request(state, told, use_tools=use_tools)
            gathering = Gathering()
            try:
                async with aclosing(await self._transport.stream(request)) as events:
                    async for batch in events:
                        gathering.feed(batch)
                        for event in batch:
                            spoken = hear(event)
                            if spoken is not None:
                                heard = True
                                yield spoken
                response = gathering.finish()
                self._check_continuation(request, response)
                answer = make_answer(response)
            except AntiphonError as error:
                if heard or "previous_response_id" not in request or not is_forgetful(error):
                    raise
                self._state = "client"
            except AssertionError:
                # What a test claims about a request must fail the test, and not only the run.
                raise
            except Exception as error:
                raise as_failure(error) from error
        yield answer

    def _make_request(self, state: State, told: Sequence[JsonObject], *, use_tools: bool) -> JsonObject:
        request = self._settings | {"include": self._include, "store": self._state == "server"}
        if self._tools:
            request["tools"] = self._tools
            if not use_tools:
                request["tool_choice"] = "none"
        if self._state == "server" and state.response_id is not None:
            fresh = state.history[state.sent :]
            return request | {"previous_response_id": state.response_id, "input": [*fresh, *told]}
        whole = since_compaction(state.history)
        return request | {"input": [*(item for item in whole if not is_hollow(item)), *told]}

    def _check_continuation(self, request: JsonObject, response: JsonObject) -> None:
        """Servers say what they have continued. One that does not has answered without knowing what was before."""
        previous = request.get("previous_response_id")
        if previous is not None and response.get("previous_response_id") != previous:
            self._state = "client"
            raise UpstreamError("The server has not continued the conversation. It is sent whole from now on.")


def as_failure(error: Exception) -> ServerError:
    """What nobody has thought of, in the ways to a model or in what that says, ends a turn as any error does."""
    logger.error("the turn failed", exc_info=error)
    return ServerError(f"The turn failed: {type(error).__name__}. The log says more.")


def hear(event: Event | Unknown) -> Spoken | None:
    """What the model says with this event, if it says something."""
    if isinstance(event, OutputTextDelta):
        return Spoken("text", event.delta)
    if isinstance(event, ReasoningTextDelta | ReasoningSummaryTextDelta):
        return Spoken("reasoning", event.delta)
    if isinstance(event, Unknown) and event.type in _SPOKEN:
        # One that we know, though not in this form: a server may leave out what we do not need.
        return Spoken(_SPOKEN[event.type], str(read_json(event.raw).get("delta") or ""))
    return None


_SPOKEN: dict[str, Literal["text", "reasoning"]] = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}


def make_answer(response: JsonObject) -> Answer:
    """The answer in a response. What the model did not get to the end of cannot be done, nor be shown to it again."""
    cut = _find_cut(response)
    given = [item for item in response["output"] if isinstance(item, dict)]
    output = [replayable(item) for item in given if not (cut and _is_torn(item))]
    named_apart = _name_apart(output)
    kept = drop_lone_reasoning(output)
    return Answer(
        str(response.get("id") or ""),
        kept,
        _read_usage(response.get("usage")),
        cut,
        len(kept) == len(given) and not named_apart,
    )


def _find_cut(response: JsonObject) -> str:
    if response.get("status") != "incomplete":
        return ""
    details = response.get("incomplete_details")
    return str((details.get("reason") if isinstance(details, dict) else None) or "incomplete")


def _is_torn(item: JsonObject) -> bool:
    """Whether it is a call that was cut off."""
    if item.get("type") != "function_call":
        return item.get("type") in OUTPUTS and item.get("status") == "incomplete"
    try:
        read_json(item.get("arguments") or "{}")
    except (msgspec.DecodeError, TypeError):
        return True
    return item.get("status") == "incomplete"


def _name_apart(output: list[JsonObject]) -> bool:
    """Give every call an id of its own. Returns whether one had to be changed."""
    taken: set[str] = set()
    changed = False
    for item in output:
        if item.get("type") not in OUTPUTS:
            continue
        call_id = str(item.get("call_id") or "")
        if not call_id or call_id in taken:
            call_id = f"{call_id or 'call'}_{len(taken) + 1}"
            changed = True
        taken.add(call_id)
        item["call_id"] = call_id
        item.setdefault("name", "")
    return changed


def _read_usage(usage: Any) -> Usage:
    """Leniently: a run that may use up only so many tokens has to know them, whatever else is missing."""
    if not isinstance(usage, dict):
        return Usage(0, 0, 0)
    read = _count(usage, "input_tokens", "prompt_tokens")
    said = _count(usage, "output_tokens", "completion_tokens")
    cached = _count(usage.get("input_tokens_details"), "cached_tokens")
    thought = _count(usage.get("output_tokens_details"), "reasoning_tokens")
    total = _count(usage, "total_tokens") or read + said
    return Usage(read, said, total, InputTokensDetails(cached), OutputTokensDetails(thought))


def _count(usage: Any, *names: str) -> int:
    found = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    return next((count for count in found if isinstance(count, int)), 0)
