"""The handlers of /v1/responses."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import Struct

from antiphon.config import Dialect
from antiphon.engine.engine import Engine
from antiphon.engine.respond.run import Events
from antiphon.protocol import codec
from antiphon.protocol.events import TERMINAL
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.server.dialect import Batch, choose_names
from antiphon.server.error_response import describe_failed
from antiphon.server.http import Exchange, Watch, read_body
from antiphon.server.keepalive import Keepalive
from antiphon.server.query import PageQuery, ResponseQuery, read_query
from antiphon.stream.sse import DONE, encode_batch


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseHandlers:
    """One method for each operation on responses."""

    def __init__(self, engine: Engine, *, max_body_bytes: int, keepalive: Keepalive, compat: Dialect) -> None:
        self._engine = engine
        self._compat = compat
        self._max_body_bytes = max_body_bytes
        self._keepalive = keepalive

    async def create(self, exchange: Exchange) -> None:
        body = await read_body(exchange, self._max_body_bytes)
        decoded = codec.decode_request(body)
        request = decoded.request
        exchange.model = request.model
        exchange.stream = bool(request.stream)
        exchange.note_ignored(decoded.ignored)
        rename = choose_names(exchange.headers, self._compat)
        with Watch(exchange):
            run = await self._engine.create(request, project=exchange.project)
            exchange.model = run.response.model
            exchange.response_id = run.response.id
            exchange.warnings += run.warnings
            tail = b""
            if request.stream:
                exchange.note_server(run.response.served_by)
                tail = await self._stream(exchange, run.events(), rename)
            else:
                await run.drain()
                exchange.note_server(run.response.served_by)  # a router has chosen by now
        if run.response.error is not None:  # the log shall know, whatever the status of an answer that had begun
            exchange.error_code = run.response.error.code
        # Outside of the watch: it would take the end of the answer for the client's leaving.
        if request.stream:
            await exchange.finish(tail + DONE)
        else:
            await _answer(exchange, run.response)

    async def retrieve(self, exchange: Exchange) -> None:
        query = read_query(exchange, ResponseQuery)
        exchange.response_id = exchange.param
        if query.stream:
            await self._follow(exchange, query)
            return
        if query.starting_after is not None:
            exchange.note_ignored(("starting_after",))
        response = await self._engine.retrieve(exchange.project, exchange.param)
        if query.wants_seals:
            response = self._engine.reasoning.seal_response(response, project=exchange.project)
        exchange.model = response.model
        await exchange.answer_with(response)

    async def delete(self, exchange: Exchange) -> None:
        exchange.response_id = exchange.param
        await self._engine.delete(exchange.project, exchange.param)
        await exchange.answer_with(DeletedResponse(exchange.param))

    async def cancel(self, exchange: Exchange) -> None:
        exchange.response_id = exchange.param
        response = await self._engine.cancel(exchange.project, exchange.param)
        exchange.model = response.model
        await exchange.answer_with(response)

    async def list_input_items(self, exchange: Exchange) -> None:
        query = read_query(exchange, PageQuery)
        exchange.response_id = exchange.param
        page = await self._engine.input_items(
            exchange.project,
            exchange.param,
            after=query.after,
            limit=query.limit,
            order=query.order,
        )
        if query.wants_seals:
            page = self._engine.reasoning.seal_page(page, project=exchange.project)
        await exchange.answer_with(page)

    async def count_input_tokens(self, exchange: Exchange) -> None:
        asked, ignored = codec.decode_count(await read_body(exchange, self._max_body_bytes))
        exchange.model = asked.model
        exchange.note_ignored(ignored)
        request = CreateRequest(**msgspec.structs.asdict(asked))
        with Watch(exchange):
            counted, warnings = await self._engine.count_input_tokens(request, project=exchange.project)
        exchange.warnings += warnings
        await exchange.answer_with(InputTokens(counted))

    async def compact(self, exchange: Exchange) -> None:
        asked, ignored = codec.decode_compact(await read_body(exchange, self._max_body_bytes))
        exchange.model = asked.model
        exchange.note_ignored(ignored)
        request = CreateRequest(**msgspec.structs.asdict(asked) | {"input": asked.input or []})
        with Watch(exchange):
            compacted, warnings = await self._engine.compact(request, project=exchange.project)
        exchange.warnings += warnings
        await exchange.answer_with(compacted)

    async def _follow(self, exchange: Exchange, query: ResponseQuery) -> None:
        """Send the events of a background response from the first, or those after a number, and what follows."""
        exchange.stream = True
        after = query.starting_after
        adapt = self._choose_form(exchange, seals=query.wants_seals)
        events = await self._engine.follow(exchange.project, exchange.param, after=-1 if after is None else after)
        with Watch(exchange):
            if after is not None:
                # The client has seen the beginning, and may have to wait for more: it shall know that we are here.
                await exchange.write(b"")
            tail = await self._stream(exchange, events, adapt, after=after)
        await exchange.finish(tail + DONE)

    def _choose_form(self, exchange: Exchange, *, seals: bool) -> Callable[[Batch], Batch]:
        """What gives events the names that a request wants, and the seals, if it wants these."""
        rename = choose_names(exchange.headers, self._compat)
        if not seals:
            return rename
        return lambda batch: rename(self._engine.reasoning.seal_events(batch, project=exchange.project))

    async def _stream(
        self, exchange: Exchange, events: Events, adapt: Callable[[Batch], Batch], *, after: int | None = None
    ) -> bytes:
        """Send the events, a batch at a time. The terminal event is handed back, to leave with the stream's end."""
        tail = b""
        with self._keepalive.watch(exchange, after=after) as pulse:
            async with aclosing(events) as batches:
                async for batch in batches:
                    chunk = encode_batch(adapt(batch))
                    if tail or type(batch[-1]) in TERMINAL:  # of structs, isinstance takes four times as long
                        tail += chunk
                    else:
                        pulse.last = batch[-1]
                        await exchange.write(chunk)
        return tail


async def _answer(exchange: Exchange, response: Response) -> None:
    failure = describe_failed(response)
    if failure is None:
        await exchange.answer_with(response)
    else:
        await exchange.answer(*failure)
