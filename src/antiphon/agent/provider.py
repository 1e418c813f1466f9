"""Turns with a model: one call each, and the model's server or this process keeps what was said before."""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.history import LOST, SEALED, cannot_open, is_hollow, is_sealed, refuses_to_seal, replayable, unseal
from antiphon.agent.transports.base import Gathering, Transport
from antiphon.errors import AntiphonError, InvalidRequest, PreviousResponseNotFound, UnsupportedParameter
from antiphon.protocol.json_text import JsonObject

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 1000
# What servers call the response that is continued.
_CONTINUATION = ("previous_response_id", "response_id")


class ToolCall(Struct, frozen=True):
    """A call that the model asks for: `id` is what its output is keyed by, `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


class Turn(Struct, frozen=True):
    text: str
    tool_calls: list[ToolCall]
    response_id: str


class _Remembered(Struct, frozen=True):
    """A turn as this process knows it: the whole history up to its end, its tools, and the calls it ended with.

    The history is None where it began elsewhere.
    """

    history: list[JsonObject] | None
    tools: list[JsonObject]
    calls: list[str]


_NOTHING = _Remembered([], [], [])


class Provider:
    """A model behind a transport.

    `state`: "server" stores every response and continues it by its id; "client" stores nothing and sends the whole
    history each time. A server that turns out not to keep what it stored, or not to know continuations at all, is asked
    the other way from then on, and so is a model that does not seal its reasoning. `carry_tools`: "always" sends the
    tools of a conversation's first turn with each of its turns, because most servers forget them; "never" sends them
    once.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        model: str,
        temperature: float | None = 0.7,
        max_output_tokens: int | None = 10240,
        state: Literal["server", "client"] = "server",
        carry_tools: Literal["always", "never"] = "always",
        text_format: JsonObject | None = None,
    ) -> None:
        self._transport = transport
        self._settings: JsonObject = {"model": model}
        if temperature is not None:
            self._settings["temperature"] = temperature
        if max_output_tokens is not None:
            self._settings["max_output_tokens"] = max_output_tokens
        if text_format is not None:
            self._settings["text"] = {"format": text_format}
        self._carry_tools = carry_tools
        self._seals = True
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()
        self.state = state

    async def close(self) -> None:
        await self._transport.close()

    async def generate_response(self, instructions: str, message: str) -> str:
        """One question, one answer, no tools."""
        request = self._settings | {"instructions": instructions, "input": message, "store": self.state == "server"}
        return _text_of(await self._ask(request))

    async def generate_responses_turn(
        self,
        previous_response_id: str | None = None,
        user_input: str | Sequence[JsonObject] | None = None,
        tools: Sequence[JsonObject] | None = None,
        function_outputs: Mapping[str, str] | None = None,
    ) -> Turn:
        """One turn: without a previous id it starts with the input and the tools, with one it continues.

        A continuation sends the outputs of the functions that the turn before has called; `user_input` then goes with
        them only if there are none to send.
        """
        if not previous_response_id:
            if user_input is None:
                raise InvalidRequest("The first turn needs input.", param="user_input")
            first = _as_items(user_input)
            return await self._take(None, first, user_input, [_flatten(tool) for tool in tools or ()])
        known = self._remembered.get(previous_response_id)
        items = _as_outputs(function_outputs, known.calls if known else ()) or _as_items(user_input)
        if not items:
            raise InvalidRequest("A continuation needs function outputs or input.", param="function_outputs")
        offered = [_flatten(tool) for tool in tools] if tools else (known.tools if known else [])
        return await self._take(previous_response_id, items, items, offered)

    async def _take(self, previous: str | None, items: list[JsonObject], sent: Any, tools: list[JsonObject]) -> Turn:
        if self.state == "server":
            try:
                return await self._chain(previous, items, sent, tools)
            except AntiphonError as error:
                forgets = is_forgetful(error) or cannot_open(error)
                if previous is None or not self._knows(previous) or not forgets:
                    raise
                self.state = "client"
        return await self._replay(previous, items, tools)

    async def _chain(self, previous: str | None, items: list[JsonObject], sent: Any, tools: list[JsonObject]) -> Turn:
        request = self._settings | {"input": sent, "store": True}
        if previous is not None:
            request["previous_response_id"] = previous
        if tools and (previous is None or self._carry_tools == "always"):
            request["tools"] = tools
        return self._remember(previous, items, tools, await self._ask(request))

    async def _replay(self, previous: str | None, items: list[JsonObject], tools: list[JsonObject]) -> Turn:
        while True:
            history = self._find(previous) if previous is not None else []
            whole = [*(item for item in history if not is_hollow(item)), *items]
            request = self._settings | {"input": whole, "store": False}
            if self._seals:
                request["include"] = [SEALED]
            if tools:
                request["tools"] = tools
            try:
                return self._remember(previous, items, tools, await self._ask(request))
            except AntiphonError as error:
                if not self._give_way(previous, error):
                    raise

    def _give_way(self, previous: str | None, error: AntiphonError) -> bool:
        """Whether the same is to be asked again, without what the server would not take."""
        if self._seals and refuses_to_seal(error):
            self._seals = False
            return True
        known = self._remembered.get(previous) if previous is not None and cannot_open(error) else None
        if previous is None or known is None or not any(map(is_sealed, known.history or ())):
            return False
        logger.warning(LOST)
        self._remembered[previous] = msgspec.structs.replace(known, history=unseal(known.history or ()))
        return True

    def _knows(self, response_id: str) -> bool:
        known = self._remembered.get(response_id)
        return known is not None and known.history is not None

    def _find(self, response_id: str) -> list[JsonObject]:
        known = self._remembered.get(response_id)
        if known is None or known.history is None:
            raise PreviousResponseNotFound(
                f"The conversation before '{response_id}' is not known here, so it cannot be sent again.",
                param="previous_response_id",
            )
        return known.history

    def _remember(
        self, previous: str | None, items: list[JsonObject], tools: list[JsonObject], response: JsonObject
    ) -> Turn:
        known = self._remembered.get(previous) if previous is not None else _NOTHING
        output = [replayable(item) for item in response["output"]]
        history = None if known is None or known.history is None else [*known.history, *items, *output]
        calls = [_as_call(item) for item in response["output"] if item.get("type") == "function_call"]
        # A server that names nothing cannot continue it either: then it is sent again under a name of ours.
        response_id = str(response.get("id") or f"turn_{secrets.token_hex(8)}")
        self._remembered[response_id] = _Remembered(history, tools, [call.id for call in calls])
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return Turn(_text_of(response), calls, response_id)

    async def _ask(self, request: JsonObject) -> JsonObject:
        gathering = Gathering()
        async with aclosing(await self._transport.stream(request)) as events:
            async for batch in events:
                gathering.feed(batch)
        return gathering.finish()


def is_forgetful(error: AntiphonError) -> bool:
    """Whether the server cannot continue a response, though it could answer a whole history."""
    if isinstance(error, PreviousResponseNotFound) or error.code == "previous_response_not_found":
        return True
    if isinstance(error, InvalidRequest) and error.param in _CONTINUATION:
        # Whatever it calls what is wrong with it.
        return True
    return (isinstance(error, UnsupportedParameter) or error.code == "unsupported_parameter") and error.param is None


def _as_items(user_input: str | Sequence[JsonObject] | None) -> list[JsonObject]:
    if not user_input:
        return []
    return [{"role": "user", "content": user_input}] if isinstance(user_input, str) else list(user_input)


def _as_outputs(outputs: Mapping[str, str] | None, order: Sequence[str]) -> list[JsonObject]:
    """In the order in which the model made the calls, whatever the order of the mapping."""
    given = dict(outputs or {})
    ordered = [call_id for call_id in order if call_id in given]
    ordered += [call_id for call_id in given if call_id not in order]
    return [{"type": "function_call_output", "call_id": call_id, "output": given[call_id]} for call_id in ordered]


def _flatten(tool: JsonObject) -> JsonObject:
    """A function tool as the API has it: flat, and strict unless it says otherwise."""
    body = tool.get("function")
    flat = {**tool, **body} if isinstance(body, dict) else dict(tool)
    flat.pop("function", None)
    flat.setdefault("type", "function")
    if flat["type"] == "function":
        flat.setdefault("strict", True)
    return flat


def _as_call(item: JsonObject) -> ToolCall:
    arguments = item.get("arguments", "")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(str(item.get("call_id") or item.get("id") or ""), str(item.get("name") or ""), text)


def _text_of(response: JsonObject) -> str:
    parts = (part for item in response["output"] if item.get("type") == "message" for part in item.get("content") or ())
    return "".join(part.get("text", "") for part in parts if part.get("type") == "output_text")
