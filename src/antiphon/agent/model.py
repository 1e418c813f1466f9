"""One turn of the model, from the run's state to its answer."""

import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from antiphon.agent.estimate import estimate_usage
from antiphon.agent.history import (
    LOST,
    OUTPUTS,
    SEALED,
    Sealing,
    cannot_open,
    drop_lone_reasoning,
    has_lone_call,
    is_call,
    is_hollow,
    is_sealed,
    mend,
    refuses_to_seal,
    replayable,
    since_compaction,
    unseal,
)
from antiphon.agent.journal import State
from antiphon.agent.provider import is_forgetful
from antiphon.agent.transports.base import Gathering, Transport
from antiphon.errors import AntiphonError, ServerError, UpstreamError
from antiphon.protocol.events import Event, OutputTextDelta, ReasoningSummaryTextDelta, ReasoningTextDelta
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown


class Spoken(Struct, frozen=True):
    """A piece of what the model says while it says it."""

    kind: Literal["text", "reasoning"]
    text: str


class Remark(Struct, frozen=True):
    """Something about the turn that a person should know."""

    text: str


class Waste(Struct, frozen=True):
    """What an attempt took that came to nothing."""

    usage: Usage


class Answer(Struct, frozen=True):
    """A whole turn: its output as items that can be sent back. `cut` is why it was cut off, if it was.

    `continues` says whether the server that gave it can go on from it: not if its output had to be put in order.
    `unsealed` says that the sealed reasoning before it could not be read, and was left out.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    cut: str = ""
    continues: bool = True
    unsealed: bool = False


Turn = AsyncGenerator["Spoken | Remark | Waste | Answer", None]


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
        read_usage(response.get("usage")),
        cut,
        len(kept) == len(given) and not named_apart and not has_lone_call(kept),
    )


def _find_cut(response: JsonObject) -> str:
    if response.get("status") != "incomplete":
        return ""
    details = response.get("incomplete_details")
    return str((details.get("reason") if isinstance(details, dict) else None) or "incomplete")


def _is_torn(item: JsonObject) -> bool:
    """Whether it is a call that was cut off."""
    if item.get("type") != "function_call":
        return is_call(item) and item.get("status") in ("incomplete", "in_progress")
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


def read_usage(usage: Any) -> Usage:
    """Leniently: a run that may use up only so many tokens has to know them, whatever else is missing."""
    if not isinstance(usage, dict):
        return Usage(0, 0, 0)
    read = _count(usage, "input_tokens", "prompt_tokens")
    said = _count(usage, "output_tokens", "completion_tokens")
    cached = _count(usage.get("input_tokens_details"), "cached_tokens")
    thought = _count(usage.get("output_tokens_details"), "reasoning_tokens")
    total = _count(usage, "total_tokens") or read + said
    details = InputTokensDetails(cached), OutputTokensDetails(thought)
    return Usage(read, said, total, *details, estimated=usage.get("estimated") is True)


def _count(usage: Any, *names: str) -> int:
    found = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    return next((count for count in found if isinstance(count, int)), 0)


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
