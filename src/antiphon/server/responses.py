"""The handlers of /v1/responses."""

from contextlib import aclosing
from typing import Literal, get_args
from urllib.parse import parse_qs

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.engine.run import Run
from antiphon.errors import InvalidRequest, UnsupportedParameter
from antiphon.protocol import codec
from antiphon.protocol.events import Completed, Failed, Incomplete
from antiphon.protocol.request import Include
from antiphon.protocol.response import Response
from antiphon.server.exchange import Exchange
from antiphon.server.failure import describe_failed
from antiphon.server.limits import read_body
from antiphon.server.watch import Watch
from antiphon.stream.sse import DONE, encode_batch

_TERMINAL = (Completed, Failed, Incomplete)
_INCLUDES = get_args(Include)
_DEFAULT_PAGE = 20
_LARGEST_PAGE = 100


class Deleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseHandlers:
    """One method for each operation on responses."""

    def __init__(self, engine: Engine, *, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def create(self, exchange: Exchange) -> None:
        body = await read_body(exchange, self._max_body_bytes)
        decoded = codec.decode_request(body)
        request = decoded.request
        exchange.model = request.model
        exchange.stream = bool(request.stream)
        exchange.note_ignored(decoded.ignored)
        with Watch(exchange):
            run = await self._engine.create(request, project=exchange.project)
            exchange.model = run.response.model
            exchange.response_id = run.response.id
            exchange.warnings += run.warnings
            tail = b""
            if request.stream:
                tail = await _stream(exchange, run)
            else:
                await run.drain()
        # Outside of the watch: it would take the end of the answer for the client's leaving.
        if request.stream:
            await exchange.finish(tail + DONE)
        else:
            await _answer(exchange, run.response)

    async def retrieve(self, exchange: Exchange) -> None:
        query = _read_query(exchange, {"stream", "starting_after", "include", "include_obfuscation"})
        if query.get("stream", "false") != "false":
            raise UnsupportedParameter("A stored response cannot be streamed.", param="stream")
        exchange.response_id = exchange.param
        response = await self._engine.retrieve(exchange.project, exchange.param)
        exchange.model = response.model
        await exchange.answer_with(response)

    async def delete(self, exchange: Exchange) -> None:
        exchange.response_id = exchange.param
        await self._engine.delete(exchange.project, exchange.param)
        await exchange.answer_with(Deleted(exchange.param))

    async def list_input_items(self, exchange: Exchange) -> None:
        query = _read_query(exchange, {"after", "limit", "order", "include"})
        exchange.response_id = exchange.param
        page = await self._engine.input_items(
            exchange.project,
            exchange.param,
            after=query.get("after"),
            limit=_read_limit(query.get("limit")),
            order=_read_order(query.get("order", "desc")),
        )
        await exchange.answer_with(page)


async def _stream(exchange: Exchange, run: Run) -> bytes:
    """Send the run's events, a batch at a time. The terminal event is handed back, to leave with the stream's end."""
    tail = b""
    async with aclosing(run.events()) as batches:
        async for batch in batches:
            chunk = encode_batch(batch)
            if tail or isinstance(batch[-1], _TERMINAL):
                tail += chunk
            else:
                await exchange.write(chunk)
    return tail


async def _answer(exchange: Exchange, response: Response) -> None:
    error = describe_failed(response)
    if error is None:
        await exchange.answer_with(response)
    else:
        exchange.error_code = response.error.code if response.error else "server_error"
        await exchange.answer(500, error)


def _read_query(exchange: Exchange, known: set[str]) -> dict[str, str]:
    """The query's parameters. What may be there is given in full anyway, so `include` is only checked."""
    if not exchange.query:
        return {}
    try:
        fields = parse_qs(exchange.query.decode("ascii"), keep_blank_values=True, max_num_fields=100, errors="strict")
    except ValueError:
        raise InvalidRequest("The query string is not valid.", code="invalid_query") from None
    named = {name.removesuffix("[]"): values for name, values in fields.items()}
    for value in named.get("include", ()):
        if value not in _INCLUDES:
            raise InvalidRequest(f"Invalid value for 'include': '{value}'.", param="include", code="invalid_value")
    exchange.note_ignored(tuple(name for name in named if name not in known))
    return {name: values[-1] for name, values in named.items()}


def _read_limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    # isdigit alone also takes digits that int does not.
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= _LARGEST_PAGE:
        raise InvalidRequest(
            f"'limit' must be a number from 1 to {_LARGEST_PAGE}.", param="limit", code="invalid_value"
        )
    return limit


def _read_order(text: str) -> Literal["asc", "desc"]:
    match text:
        case "asc" | "desc":
            return text
        case _:
            raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order", code="invalid_value")
