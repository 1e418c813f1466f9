"""Single turns with a model, with the conversation state on the server or in this process."""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct

from antiphon.agent.history import (
    ENCRYPTED_REASONING,
    REASONING_LOST,
    cannot_decrypt,
    drop_encrypted,
    is_empty_reasoning,
    is_encrypted,
    refuses_encryption,
    to_input_item,
)
from antiphon.agent.transports.base import ResponseCollector, Transport
from antiphon.errors import AntiphonError, InvalidRequest, PreviousResponseNotFound, UnsupportedParameter
from antiphon.protocol.json_text import JsonObject, to_text

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 1000
# The names that servers use for the parameter with the previous response.
_PREVIOUS_PARAMS = ("previous_response_id", "response_id")


class ToolCall(Struct, frozen=True):
    """A tool call of the model. `id` is the call id for its output, `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


class Turn(Struct, frozen=True):
    """The result of one turn."""

    text: str
    tool_calls: list[ToolCall]
    response_id: str


class _StoredTurn(Struct, frozen=True):
    """A turn in the memory of this process: the history up to its end, its tools, and the ids of its calls.

    The history is None if the conversation began in another process.
    """

    history: list[JsonObject] | None
    tools: list[JsonObject]
    calls: list[str]


_EMPTY = _StoredTurn([], [], [])


class Provider:
    """A model behind a transport.

    `state`: "server" stores every response and continues it by its id; "client" stores nothing and sends the whole
    history each time. The provider changes to "client" if the server cannot continue a response. It stops requesting
    encrypted reasoning if the model refuses it. `carry_tools`: "always" sends the tools of a conversation's first turn
    with each of its turns, because most servers do not store them; "never" sends them once.
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
        self._requests_encryption = True
        self._turns: OrderedDict[str, _StoredTurn] = OrderedDict()
        self.state = state

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self._settings["model"])

    async def close(self) -> None:
        await self._transport.close()

    async def generate_response(self, instructions: str, message: str) -> str:
        """Return the answer to one message, without tools."""
        request = self._settings | {"instructions": instructions, "input": message, "store": self.state == "server"}
        return _join_text(await self._send(request))

    async def generate_responses_turn(
        self,
        previous_response_id: str | None = None,
        user_input: str | Sequence[JsonObject] | None = None,
        tools: Sequence[JsonObject] | None = None,
        function_outputs: Mapping[str, str] | None = None,
    ) -> Turn:
        """Take one turn: start with the input and the tools, or continue the response of `previous_response_id`.

        A continuation sends `function_outputs`, the outputs of the calls of the turn before. It sends `user_input` only
        if there are no outputs.
        """
        if not previous_response_id:
            if user_input is None:
                raise InvalidRequest("The first turn requires input.", param="user_input")
            items = _make_items(user_input)
            return await self._take_turn(None, items, user_input, [_flatten(tool) for tool in tools or ()])
        known = self._turns.get(previous_response_id)
        items = _make_outputs(function_outputs, known.calls if known else ()) or _make_items(user_input)
        if not items:
            raise InvalidRequest("A continuation requires function outputs or input.", param="function_outputs")
        offered = [_flatten(tool) for tool in tools] if tools else (known.tools if known else [])
        return await self._take_turn(previous_response_id, items, items, offered)

    async def _take_turn(
        self, previous: str | None, items: list[JsonObject], sent: Any, tools: list[JsonObject]
    ) -> Turn:
        if self.state == "server":
            try:
                return await self._continue(previous, items, sent, tools)
            except AntiphonError as error:
                cannot_continue = is_continuation_error(error) or cannot_decrypt(error)
                if previous is None or not self._has_history(previous) or not cannot_continue:
                    raise
                self.state = "client"
        return await self._send_history(previous, items, tools)

    async def _continue(
        self, previous: str | None, items: list[JsonObject], sent: Any, tools: list[JsonObject]
    ) -> Turn:
        request = self._settings | {"input": sent, "store": True}
        if previous is not None:
            request["previous_response_id"] = previous
        if tools and (previous is None or self._carry_tools == "always"):
            request["tools"] = tools
        return self._store(previous, items, tools, await self._send(request))

    async def _send_history(self, previous: str | None, items: list[JsonObject], tools: list[JsonObject]) -> Turn:
        while True:
            history = self._find_history(previous) if previous is not None else []
            whole = [*(item for item in history if not is_empty_reasoning(item)), *items]
            request = self._settings | {"input": whole, "store": False}
            if self._requests_encryption:
                request["include"] = [ENCRYPTED_REASONING]
            if tools:
                request["tools"] = tools
            try:
                return self._store(previous, items, tools, await self._send(request))
            except AntiphonError as error:
                if not self._apply_fallback(previous, error):
                    raise

    def _apply_fallback(self, previous: str | None, error: AntiphonError) -> bool:
        """Change the settings or the history after an error. Return True if the request is to be repeated."""
        if self._requests_encryption and refuses_encryption(error):
            self._requests_encryption = False
            return True
        known = self._turns.get(previous) if previous is not None and cannot_decrypt(error) else None
        if previous is None or known is None or not any(map(is_encrypted, known.history or ())):
            return False
        logger.warning(REASONING_LOST)
        self._turns[previous] = msgspec.structs.replace(known, history=drop_encrypted(known.history or ()))
        return True

    def _has_history(self, response_id: str) -> bool:
        known = self._turns.get(response_id)
        return known is not None and known.history is not None

    def _find_history(self, response_id: str) -> list[JsonObject]:
        known = self._turns.get(response_id)
        if known is None or known.history is None:
            raise PreviousResponseNotFound(
                f"The history before '{response_id}' is not known here, so it cannot be sent again.",
                param="previous_response_id",
            )
        return known.history

    def _store(
        self, previous: str | None, items: list[JsonObject], tools: list[JsonObject], response: JsonObject
    ) -> Turn:
        known = self._turns.get(previous) if previous is not None else _EMPTY
        output = [to_input_item(item) for item in response["output"]]
        history = None if known is None or known.history is None else [*known.history, *items, *output]
        calls = [_to_call(item) for item in response["output"] if item.get("type") == "function_call"]
        # A server that returns no id cannot continue the response: the history is sent, and the id is only for here.
        response_id = str(response.get("id") or f"turn_{secrets.token_hex(8)}")
        self._turns[response_id] = _StoredTurn(history, tools, [call.id for call in calls])
        if len(self._turns) > _MAX_REMEMBERED:
            self._turns.popitem(last=False)
        return Turn(_join_text(response), calls, response_id)

    async def _send(self, request: JsonObject) -> JsonObject:
        collector = ResponseCollector()
        async with aclosing(await self._transport.stream(request)) as events:
            async for batch in events:
                collector.feed(batch)
        return collector.finish()


def is_continuation_error(error: AntiphonError) -> bool:
    """Return True if the server cannot continue a response but may answer a request with the whole history."""
    if isinstance(error, PreviousResponseNotFound) or error.code == "previous_response_not_found":
        return True
    if isinstance(error, InvalidRequest) and error.param in _PREVIOUS_PARAMS:
        return True
    return (isinstance(error, UnsupportedParameter) or error.code == "unsupported_parameter") and error.param is None


def _make_items(user_input: str | Sequence[JsonObject] | None) -> list[JsonObject]:
    if not user_input:
        return []
    return [{"role": "user", "content": user_input}] if isinstance(user_input, str) else list(user_input)


def _make_outputs(outputs: Mapping[str, str] | None, order: Sequence[str]) -> list[JsonObject]:
    """Return the output items in the order of the calls."""
    by_id = dict(outputs or {})
    ordered = [call_id for call_id in order if call_id in by_id]
    ordered += [call_id for call_id in by_id if call_id not in order]
    return [{"type": "function_call_output", "call_id": call_id, "output": by_id[call_id]} for call_id in ordered]


def _flatten(tool: JsonObject) -> JsonObject:
    """Return a function tool in the flat form of the API, strict by default."""
    body = tool.get("function")
    flat = {**tool, **body} if isinstance(body, dict) else dict(tool)
    flat.pop("function", None)
    flat.setdefault("type", "function")
    if flat["type"] == "function":
        flat.setdefault("strict", True)
    return flat


def _to_call(item: JsonObject) -> ToolCall:
    text = to_text(item.get("arguments", ""))
    return ToolCall(str(item.get("call_id") or item.get("id") or ""), str(item.get("name") or ""), text)


def _join_text(response: JsonObject) -> str:
    parts = (part for item in response["output"] if item.get("type") == "message" for part in item.get("content") or ())
    return "".join(part.get("text", "") for part in parts if part.get("type") == "output_text")
