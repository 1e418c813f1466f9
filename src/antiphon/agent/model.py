"""The client of a model: requests its turns, and repeats a request without the parts that the server refuses."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import aclosing
from typing import Literal, Protocol

import msgspec

from antiphon.agent.handoffs import InputFilter as HistoryFilter
from antiphon.agent.handoffs import require_items
from antiphon.agent.history import (
    ENCRYPTED_REASONING,
    REASONING_LOST,
    HistoryCompleter,
    ModelSupport,
    cannot_decrypt,
    complete_history,
    drop_encrypted,
    is_encrypted,
    refuses_encryption,
    refuses_format,
)
from antiphon.agent.model_answer import (
    AnyDelta,
    ArgumentsReader,
    FailedAttempt,
    ModelAnswer,
    ModelNotice,
    RawModelEvent,
    TurnStream,
    make_answer,
    read_delta,
)
from antiphon.agent.provider import is_continuation_error
from antiphon.agent.run_state import RunState
from antiphon.agent.transports.base import ResponseCollector, Transport
from antiphon.agent.typed_output import TypedOutput
from antiphon.callbacks import call_callback
from antiphon.errors import AntiphonError, ServerError, UpstreamError
from antiphon.protocol.events import Event
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.tools.native import CALL_TYPES
from antiphon.upstream.usage import estimate_payload_usage, parse_usage

logger = logging.getLogger(__name__)

FORMAT_REFUSED = "The model has no structured output. The instructions contain the schema of the output instead."

Fallback = Literal["send_history", "request_no_encryption", "drop_encrypted", "prompt_output"]
"""A change to a request that the server did not accept.

`send_history`: send the whole history instead of continuing a response. `request_no_encryption`: do not request
encrypted reasoning. `drop_encrypted`: do not send encrypted reasoning back. `prompt_output`: put the schema of the
output into the instructions instead of `text.format`.
"""

_FALLBACK_NOTICES: dict[Fallback, str] = {"drop_encrypted": REASONING_LOST, "prompt_output": FORMAT_REFUSED}


class HistoryFilterFailed(AntiphonError):
    """The history filter of an agent raised an exception, or returned no items."""

    status = 500
    type = "server_error"
    default_code = "history_filter_failed"


class ModelClient(Protocol):
    """A model that takes turns. `interrupted_usage` is the usage of a turn whose stream was closed before its end."""

    interrupted_usage: Usage

    def take_turn(self, state: RunState, extra_input: Sequence[JsonObject], *, use_tools: bool) -> TurnStream:
        """Request one turn. The answer is the last element. Closing the stream stops the model."""


class ResponsesModel:
    """A model behind a transport of the Responses API.

    `settings` are the parameters of every request. With `conversation_state="client"` every request has the whole
    history; with "server" it continues the response before, as long as the server supports that. `support` is shared
    by all runs of the model. `output` is the type of the answer; the settings have its `text.format`. `history_filter`
    selects the items of each request. With `raw_events` every event of the server is also part of the stream. Each run
    has its own instance.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        settings: JsonObject,
        tools: Sequence[JsonObject],
        conversation_state: Literal["client", "server"] = "client",
        support: ModelSupport | None = None,
        output: TypedOutput | None = None,
        history_filter: HistoryFilter | None = None,
        raw_events: bool = False,
    ) -> None:
        self._transport = transport
        self._history_filter = history_filter
        self._output = output
        self._output_tools = [] if output is None else output.describe_tools()
        self._raw_events = raw_events
        self._server_tools: Sequence[JsonObject] = settings.get("tools", ())
        self.set_tools(tools)
        self._include = _choose_include(settings)
        self._settings = {name: value for name, value in settings.items() if name != "include"}
        self._conversation_state = conversation_state
        self._support = support or ModelSupport()
        self._completer = HistoryCompleter()
        self.interrupted_usage = Usage(0, 0, 0)

    def set_instructions(self, instructions: str | None) -> None:
        """Replace the instructions of the following requests."""
        self._settings = {name: value for name, value in self._settings.items() if name != "instructions"}
        if instructions is not None:
            self._settings["instructions"] = instructions

    def set_tools(self, tools: Sequence[JsonObject]) -> None:
        """Replace the tools of the following requests. The tools in the settings, which the server runs, stay."""
        self._tools = [*self._server_tools, *tools, *self._output_tools]
        self._native_types = frozenset(CALL_TYPES[each["type"]] for each in tools if each["type"] in CALL_TYPES)

    async def take_turn(self, state: RunState, extra_input: Sequence[JsonObject], *, use_tools: bool) -> TurnStream:
        fallbacks: set[Fallback] = set()
        self.interrupted_usage = Usage(0, 0, 0)
        answer: ModelAnswer | None = None
        while answer is None:
            attempt = await self._prepare(state, extra_input, fallbacks, use_tools=use_tools)
            try:
                async with aclosing(await self._transport.stream(attempt.request)) as events:
                    async for batch in events:
                        deltas = attempt.feed(batch)
                        if deltas:
                            yield deltas
                answer = attempt.finish()
            except AntiphonError as error:
                usage = attempt.estimate_failed_usage()
                if usage.total_tokens:
                    yield FailedAttempt(usage)
                fallback = self._choose_fallback(attempt, error)
                if fallback is None or fallback in fallbacks:
                    raise
                fallbacks.add(fallback)
                if fallback in _FALLBACK_NOTICES:
                    yield ModelNotice(_FALLBACK_NOTICES[fallback])
            except (asyncio.CancelledError, GeneratorExit, AssertionError):
                # An assertion of a test transport must fail the test, not only the run.
                self.interrupted_usage = attempt.estimate_failed_usage()
                raise
            except Exception as error:
                raise make_turn_error(error) from error
        self._support.refuses_encryption |= "request_no_encryption" in fallbacks
        self._support.refuses_format |= "prompt_output" in fallbacks
        yield msgspec.structs.replace(answer, drops_encrypted="drop_encrypted" in fallbacks)

    async def _prepare(
        self, state: RunState, extra_input: Sequence[JsonObject], fallbacks: Collection[Fallback], *, use_tools: bool
    ) -> "_Attempt":
        attempt = self._build(state, extra_input, fallbacks, use_tools=use_tools)
        return attempt if self._history_filter is None else await self._filter(attempt, self._history_filter)

    def _build(
        self, state: RunState, extra_input: Sequence[JsonObject], fallbacks: Collection[Fallback], *, use_tools: bool
    ) -> "_Attempt":
        request = {"store": self._conversation_state == "server", **self._settings}
        encrypts = not self._support.refuses_encryption and "request_no_encryption" not in fallbacks
        include = [value for value in self._include if encrypts or value != ENCRYPTED_REASONING]
        if include:
            request["include"] = include
        if self._tools:
            self._add_tools(request, state, use_tools=use_tools)
        if self._output is not None:
            self._add_output(request, self._output, fallbacks)
        if self._conversation_state == "server" and state.response_id is not None:
            new_items = [*state.history[state.sent_count :], *extra_input]
            request |= {"previous_response_id": state.response_id, "input": new_items}
            return self._make_attempt(request, [*state.history, *extra_input])
        history = drop_encrypted(state.history) if "drop_encrypted" in fallbacks else state.history
        items = [*self._completer.complete(history), *extra_input]
        return self._make_attempt(request | {"input": items}, items)

    async def _filter(self, attempt: "_Attempt", history_filter: HistoryFilter) -> "_Attempt":
        """Return the attempt with the items that the filter selects. Raises HistoryFilterFailed."""
        try:
            items = await call_callback(history_filter, list(attempt.request["input"]))
            completed = complete_history(require_items(items, "history_filter"))
        except AssertionError:
            # An assertion of a test must fail the test, not only the run.
            raise
        except Exception as error:
            logger.warning("the history_filter failed", exc_info=error)
            raise HistoryFilterFailed(f"The history_filter failed: {type(error).__name__}: {error}") from error
        return self._make_attempt(attempt.request | {"input": completed}, completed)

    def _make_attempt(self, request: JsonObject, context: Sequence[JsonObject]) -> "_Attempt":
        return _Attempt(request, context, raw_events=self._raw_events, native_types=self._native_types)

    def _add_tools(self, request: JsonObject, state: RunState, *, use_tools: bool) -> None:
        request["tools"] = self._tools
        if not use_tools:
            # An answer by a tool call is possible in the last turn too.
            request |= {"tools": self._output_tools} if self._output_tools else {}
            request["tool_choice"] = "required" if self._output_tools else "none"
        elif state.tool_calls > state.calls_before_handoff and _forces_call(request.get("tool_choice")):
            # It applies to the first call. If it applied to every turn, the model could never answer.
            del request["tool_choice"]
        if self._output_tools:
            request.setdefault("tool_choice", "required")

    def _add_output(self, request: JsonObject, output: TypedOutput, fallbacks: Collection[Fallback]) -> None:
        """Put the schema of the output into the instructions if the model does not get it otherwise."""
        falls_back = output.mode == "native" and (self._support.refuses_format or "prompt_output" in fallbacks)
        if falls_back:
            request["text"] = {name: value for name, value in request["text"].items() if name != "format"}
        if falls_back or output.mode == "prompt":
            instructions = request.get("instructions")
            request["instructions"] = f"{instructions}\n\n{output.prompt}" if instructions else output.prompt

    def _choose_fallback(self, attempt: "_Attempt", error: AntiphonError) -> Fallback | None:
        """Return the change after which the server is expected to answer, if there is one."""
        fallback = None if attempt.texts else _find_fallback(attempt.request, error)
        if fallback == "send_history" or attempt.ignores_previous:
            self._conversation_state = "client"
        return fallback


class _Attempt:
    """One request and its response. `context` are all items that the model reads for it."""

    def __init__(
        self, request: JsonObject, context: Sequence[JsonObject], *, raw_events: bool, native_types: Collection[str]
    ) -> None:
        self.request = request
        self.texts: list[str] = []
        self.ignores_previous = False
        """True if the server has answered without the response that it should have continued."""
        self._context = context
        self._raw_events = raw_events
        self._native_types = native_types
        self._collector = ResponseCollector()
        self._calls = ArgumentsReader()

    def feed(self, batch: Sequence[Event | Unknown]) -> list[AnyDelta]:
        """Collect the events of a batch and return its deltas."""
        self._collector.feed(batch)
        deltas: list[AnyDelta] = []
        for event in batch:
            if self._raw_events:
                deltas.append(RawModelEvent(event))
            delta = read_delta(event)
            if delta is not None:
                self.texts.append(delta.text)
                deltas.append(delta)
            elif (part := self._calls.read(event)) is not None:
                deltas.append(part)
        return deltas

    def finish(self) -> ModelAnswer:
        """Return the answer. Raises if the response failed or does not continue the right response."""
        response = self._collector.finish()
        previous = self.request.get("previous_response_id")
        # A response names the response that it continues.
        self.ignores_previous = previous is not None and response.get("previous_response_id") != previous
        if self.ignores_previous:
            raise UpstreamError("The server did not continue the conversation. Later requests send the whole history.")
        answer = make_answer(response, self._native_types)
        if answer.usage.total_tokens:
            return answer
        return msgspec.structs.replace(answer, usage=estimate_payload_usage(self.request, self._context, answer.output))

    def estimate_failed_usage(self) -> Usage:
        """Return the usage of a failed attempt: as reported, else an estimate if the model had begun to answer."""
        reported = parse_usage((self._collector.response or {}).get("usage")) or Usage(0, 0, 0)
        received = self._collector.items or ([{"content": "".join(self.texts)}] if self.texts else [])
        if received and not reported.total_tokens:
            return estimate_payload_usage(self.request, self._context, received)
        return reported


def _forces_call(choice: object) -> bool:
    """Return True if a tool_choice lets the model not answer with a text."""
    if isinstance(choice, dict):
        return choice.get("type") != "allowed_tools" or choice.get("mode") == "required"
    return choice == "required"


def make_turn_error(error: Exception) -> ServerError:
    """Log an unexpected exception of a turn and return it as an error that ends the run as failed."""
    logger.error("turn failed", exc_info=error)
    return ServerError(f"The turn failed: {type(error).__name__}. See the log for details.")


def _choose_include(settings: JsonObject) -> list[str]:
    """Return the `include` of the settings plus encrypted reasoning. An empty list in the settings stays empty."""
    configured = settings.get("include", ())
    if "include" in settings and not configured:
        return []
    return list(dict.fromkeys([*configured, ENCRYPTED_REASONING]))


def _find_fallback(request: JsonObject, error: AntiphonError) -> Fallback | None:
    if ENCRYPTED_REASONING in request.get("include", ()) and refuses_encryption(error):
        return "request_no_encryption"
    if request.get("text", {}).get("format", {}).get("type") == "json_schema" and refuses_format(error):
        return "prompt_output"
    if cannot_decrypt(error) and any(map(is_encrypted, request["input"])):
        return "drop_encrypted"
    if "previous_response_id" in request and (is_continuation_error(error) or cannot_decrypt(error)):
        return "send_history"
    return None
