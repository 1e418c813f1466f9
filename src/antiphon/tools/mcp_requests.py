"""Requests that an MCP server sends to its client during a call: elicitation and sampling.

Without a function for them they are refused, and the server goes on without them.
"""

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from antiphon.protocol.json_text import JsonObject
from antiphon.tools.function import call_function

logger = logging.getLogger(__name__)

_INTERNAL_ERROR = -32603
_REFUSED = -1
"""The code of the protocol for a request that the user has rejected."""


class McpElicitation(Struct, frozen=True, kw_only=True):
    """A question of an MCP server to the user. `server` is its name in messages.

    `schema` is the JSON Schema of the answer: an object of strings, numbers and booleans. With a `url`, the user is
    asked to open a page instead, and the answer has no fields.
    """

    server: str
    message: str
    schema: JsonObject
    url: str | None = None


class McpSampling(Struct, frozen=True, kw_only=True):
    """A request of an MCP server for an answer of a model. `server` is its name in messages.

    `messages` are input items: a task for an agent. The other fields are wishes of the server.
    """

    server: str
    messages: list[JsonObject]
    max_tokens: int
    instructions: str | None = None
    temperature: float | None = None
    stop_sequences: tuple[str, ...] = ()
    model_hints: tuple[str, ...] = ()


class _UnsupportedRequest(Exception):
    """A request of a server that Antiphon cannot represent. The server reads the message."""


OnElicitation: TypeAlias = Callable[[McpElicitation], Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None]
"""Returns the answer of the user, or None if the user declines."""

OnSampling: TypeAlias = Callable[[McpSampling], str | Awaitable[str | None] | None]
"""Returns the answer of a model, or None to refuse the request."""


def make_callbacks(
    server: str,
    on_elicitation: OnElicitation | None,
    on_sampling: OnSampling | None,
    translate: Callable[[JsonObject], JsonObject],
) -> dict[str, Any]:
    """Return the callbacks of the client of the `mcp` package. `translate` makes an input item of a message."""
    callbacks: dict[str, Any] = {}
    if on_elicitation is not None:
        callbacks["elicitation_callback"] = _make_elicitation(server, on_elicitation)
    if on_sampling is not None:
        callbacks["sampling_callback"] = _make_sampling(server, on_sampling, translate)
    return callbacks


def _make_elicitation(server: str, answer: OnElicitation) -> Callable[[Any, Any], Awaitable[Any]]:
    async def elicit(_: Any, params: Any) -> Any:
        from mcp.types import ElicitResult, ErrorData

        question = McpElicitation(
            server=server,
            message=params.message,
            schema=getattr(params, "requested_schema", None) or {},
            url=getattr(params, "url", None),
        )
        try:
            content = await _answer(answer, question)
            if content is None:
                return ElicitResult(action="decline")
            return ElicitResult(action="accept", content=None if question.url else dict(content))
        except Exception as error:
            return ErrorData(code=_INTERNAL_ERROR, message=_describe_failure("on_elicitation", server, error))

    return elicit


def _make_sampling(
    server: str, answer: OnSampling, translate: Callable[[JsonObject], JsonObject]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def sample(_: Any, params: Any) -> Any:
        from mcp.types import CreateMessageResult, ErrorData, TextContent

        try:
            text = await _answer(answer, _read_sampling(server, params, translate))
            if text is None:
                return ErrorData(code=_REFUSED, message="The request was refused.")
            content = TextContent(type="text", text=text)
            return CreateMessageResult(role="assistant", content=content, model="agent", stop_reason="endTurn")
        except Exception as error:
            return ErrorData(code=_INTERNAL_ERROR, message=_describe_failure("on_sampling", server, error))

    return sample


async def _answer(function: Callable[[Any], Any], request: McpElicitation | McpSampling) -> Any:
    """Return the result of a function. One that is not asynchronous may wait for a person, so it runs in a thread."""
    return await call_function(functools.partial(function, request), {}, name=f"for {request.server}")


def _read_sampling(server: str, params: Any, translate: Callable[[JsonObject], JsonObject]) -> McpSampling:
    """Raise _UnsupportedRequest for a request that a function for sampling cannot answer."""
    if params.tools:
        raise _UnsupportedRequest("Sampling with tools is not supported.")
    preferences = params.model_preferences
    hints = (hint.name for hint in (preferences.hints or ()) if hint.name) if preferences is not None else ()
    dumped = [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in params.messages]
    return McpSampling(
        server=server,
        messages=[translate({**each, "content": part}) for each in dumped for part in _list_parts(each["content"])],
        max_tokens=params.max_tokens,
        instructions=params.system_prompt,
        temperature=params.temperature,
        stop_sequences=tuple(params.stop_sequences or ()),
        model_hints=tuple(hints),
    )


def _list_parts(content: Any) -> list[JsonObject]:
    return content if isinstance(content, list) else [content]


def _describe_failure(option: str, server: str, error: Exception) -> str:
    """Log an exception of a function and return the message for the server, without details of this process."""
    logger.warning("%s of the MCP server %s failed", option, server, exc_info=error)
    return str(error) if isinstance(error, _UnsupportedRequest) else "The client cannot answer."
