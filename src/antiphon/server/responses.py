"""The handlers of /v1/responses."""

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
from msgspec import Struct

from antiphon import offload
from antiphon.config.settings import Settings
from antiphon.engine.background.event_reader import EventPage, EventPages
from antiphon.engine.background.responses import BackgroundRun
from antiphon.engine.engine import Engine
from antiphon.engine.items import ItemPage
from antiphon.engine.respond.run import Run
from antiphon.errors import InvalidRequest, NotFound, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.offload import is_large, run_in_thread
from antiphon.protocol import codec
from antiphon.protocol.events import TERMINAL, is_delta
from antiphon.protocol.request import CompactRequest, CountRequest, CreateRequest
from antiphon.protocol.response import CompactedResponse, Response
from antiphon.server.dialect import OutputDialect, choose_dialect
from antiphon.server.disconnect_watch import DisconnectWatch
from antiphon.server.error_response import encode_failed_response
from antiphon.server.http import LARGE_STREAM_BYTES, PART_BYTES, HttpRequest
from antiphon.server.include import IncludeFilter, add_include
from antiphon.server.keepalive import Keepalive
from antiphon.server.query import PageQuery, ResponseQuery, read_query
from antiphon.server.request_body import decode_body, is_short, read_body, read_json_body
from antiphon.server.response_body import MIN_BYTES, SharedBodies
from antiphon.server.router import Operation
from antiphon.stream.sse import DONE, encode_batch, encode_start

if TYPE_CHECKING:
    from antiphon.server.metrics.server_metrics import ServerMetrics

# A response that failed because the server is unavailable can be tried again.
RETRY_SOON = (b"retry-after", b"1")


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseHandlers:
    """One method per operation on responses."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": Operation(
            id="createResponse",
            summary="Create a response.",
            body_type=CreateRequest,
            response_type=Response,
            streams=True,
            errors=(NotFound, RateLimited, UpstreamError, Unavailable, UpstreamTimeout),
        ),
        "count_input_tokens": Operation(
            id="countInputTokens",
            summary="Count the input tokens of a request.",
            body_type=CountRequest,
            response_type=InputTokens,
            errors=(NotFound,),
        ),
        "compact": Operation(
            id="compactResponse",
            summary="Compact a conversation so that it fits the context window.",
            body_type=CompactRequest,
            response_type=CompactedResponse,
            errors=(NotFound,),
        ),
        "retrieve": Operation(
            id="getResponse",
            summary="Get a stored response, or stream the events of a background response.",
            query_type=ResponseQuery,
            response_type=Response,
            streams=True,
        ),
        "delete": Operation(id="deleteResponse", summary="Delete a stored response.", response_type=DeletedResponse),
        "cancel": Operation(
            id="cancelResponse",
            summary="Cancel a response that is in progress.",
            response_type=Response,
            errors=(InvalidRequest,),
        ),
        "list_input_items": Operation(
            id="listInputItems",
            summary="List the input items of a stored response.",
            query_type=PageQuery,
            response_type=ItemPage,
        ),
    }

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        *,
        keepalive: Keepalive,
        metrics: "ServerMetrics | None" = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._compat = settings.compat
        self._max_body_bytes = settings.max_body_bytes
        self._max_body_values = settings.max_body_values
        self._keepalive = keepalive
        self._bodies = SharedBodies()
        self._metrics = metrics
        self._stateless = settings.stateless  # `background` is ignored

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_body(http_request, self._max_body_bytes)
        if is_short(body, self._max_body_values):
            decoded = codec.decode_request(body)
        else:
            decoded = await decode_body(codec.decode_request, body, max_values=self._max_body_values)
        request = decoded.body
        http_request.model = request.model
        http_request.stream = bool(request.stream)
        http_request.warn_ignored(decoded.ignored)
        dialect = choose_dialect(http_request.headers, self._compat)
        # A background request that has arrived is accepted, even if its client does not wait for the response.
        is_queued = request.background and not self._stateless
        accepted = await self._accept(http_request, request) if is_queued else None
        with DisconnectWatch(http_request):
            run = accepted or await self._engine.create(
                request, project=http_request.project, key_id=http_request.key_id
            )
            response = run.response
            http_request.describe_response(response.model, response.id, run.warnings)
            if response.tools:
                dialect = add_include(dialect, response, request.include)
            tail = b""
            if request.stream:
                http_request.add_served_by(response.served_by)
                if isinstance(run, BackgroundRun):
                    await self._stream_pages(http_request, run.events(), dialect)
                else:
                    first_token = None if self._metrics is None else self._metrics.watch_first_token(http_request)
                    tail = await self._stream(http_request, run, dialect)
                    if first_token is not None and run.response.output:
                        first_token.record()
            else:
                await run.drain()
                http_request.add_served_by(run.response.served_by)  # a router has chosen its backend by now
        response = run.response
        if response.error is not None:  # the log shows the error even if the status was sent before
            http_request.error_code = response.error.code
        # Outside of the watch: after the response ends, ASGI reports a disconnect.
        if request.stream:
            await http_request.finish(tail + DONE)
        else:
            adapted = dialect.adapt_response(response)
            encoded = run.encoded if adapted is response and isinstance(run, Run) else None
            await _respond(http_request, adapted, None if encoded is None else encoded.join(response))

    async def _accept(self, http_request: HttpRequest, request: CreateRequest) -> Run | BackgroundRun:
        """Accept a background request. Its response runs within other limits than the HTTP request."""
        accepted = await self._engine.create(request, project=http_request.project, key_id=http_request.key_id)
        http_request.response_id = accepted.response.id
        if http_request.permit is not None:
            http_request.permit.release()
        return accepted

    async def retrieve(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ResponseQuery)
        dialect = choose_dialect(http_request.headers, self._compat)
        http_request.response_id = http_request.path_param
        if query.stream:
            await self._follow(http_request, query, dialect)
            return
        if query.starting_after is not None:
            http_request.warn_ignored(("starting_after",))
        response = await self._engine.retrieve(http_request.project, http_request.path_param)
        response = IncludeFilter(query.include).filter_response(response)
        if query.wants_seals:
            response = self._engine.reasoning.seal_response(response, project=http_request.project)
        http_request.model = response.model
        body = await offload.run(codec.encode, dialect.adapt_response(response))
        del response  # not held while the client reads
        if len(body) < MIN_BYTES:
            await http_request.respond(200, body)
            return
        shared = self._bodies.share(body)
        del body
        await http_request.respond_in_parts(shared)

    async def delete(self, http_request: HttpRequest) -> None:
        http_request.response_id = http_request.path_param
        await self._engine.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedResponse(http_request.path_param))

    async def cancel(self, http_request: HttpRequest) -> None:
        dialect = choose_dialect(http_request.headers, self._compat)
        http_request.response_id = http_request.path_param
        response = await self._engine.cancel(http_request.project, http_request.path_param)
        http_request.model = response.model
        await http_request.respond_with(dialect.adapt_response(IncludeFilter(None).filter_response(response)))

    async def list_input_items(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, PageQuery)
        http_request.response_id = http_request.path_param
        await http_request.respond_with(await self._load_page(http_request, query))

    async def _load_page(self, http_request: HttpRequest, query: PageQuery) -> ItemPage:
        project = http_request.project
        page = await self._engine.input_items(
            project, http_request.path_param, after=query.after, limit=query.limit, order=query.order
        )
        if query.wants_seals:
            page = self._engine.reasoning.seal_page(page, project=project)
        return IncludeFilter(query.include).filter_page(page)

    async def count_input_tokens(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, codec.decode_count, self._settings)
        http_request.model = body.model
        request = CreateRequest(**msgspec.structs.asdict(body))
        with DisconnectWatch(http_request):
            counted, warnings = await self._engine.count_input_tokens(request, project=http_request.project)
        http_request.warnings += warnings
        await http_request.respond_with(InputTokens(counted))

    async def compact(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, codec.decode_compact, self._settings)
        http_request.model = body.model
        request = CreateRequest(**msgspec.structs.asdict(body) | {"input": body.input or []})
        with DisconnectWatch(http_request):
            compacted, warnings = await self._engine.compact(
                request, project=http_request.project, key_id=http_request.key_id
            )
        http_request.warnings += warnings
        await http_request.respond_with(compacted)

    async def _follow(self, http_request: HttpRequest, query: ResponseQuery, dialect: OutputDialect) -> None:
        """Stream the events of a background response, from the first or after a sequence number, until it ends."""
        http_request.stream = True
        after = query.starting_after
        events = await self._engine.follow(
            http_request.project, http_request.path_param, after=-1 if after is None else after
        )
        dialect = IncludeFilter(query.include).adapt(dialect)
        if query.wants_seals:
            dialect = self._add_seals(dialect, http_request.project)
        with DisconnectWatch(http_request):
            if after is not None:
                # The client may have to wait for the next event. Send the headers now.
                await http_request.write(b"")
            await self._stream_pages(http_request, events, dialect, after=after)
        await http_request.finish(DONE)

    def _add_seals(self, dialect: OutputDialect, project: str) -> OutputDialect:
        """Return the dialect, for events that are sealed first."""
        seal, adapt = self._engine.reasoning.seal_events, dialect.adapt_events
        return msgspec.structs.replace(dialect, adapt_events=lambda batch: adapt(seal(batch, project=project)))

    async def _stream(self, http_request: HttpRequest, run: Run, dialect: OutputDialect) -> bytes:
        """Send the events in batches. Return the encoded terminal event, to send it together with the end marker."""
        tail = b""
        adapt = dialect.adapt_events
        with self._keepalive.watch(http_request, dialect.encode_keepalive) as activity:
            async with aclosing(run.events()) as batches:
                async for batch in batches:
                    if not http_request.status and not is_large():
                        activity.last_event = batch[-1]
                        await http_request.write(encode_start(adapt(batch)))
                        continue
                    # The closing events repeat the whole output, others the parameters of the request. A client that
                    # does not read must not hold all of them.
                    is_long = http_request.bytes_sent > LARGE_STREAM_BYTES or (is_large() and not is_delta(batch[-1]))
                    for part in [(event,) for event in batch] if is_long else (batch,):
                        if is_long:
                            await http_request.wait_until_writable()
                        if is_long and not is_delta(part[0]):
                            chunk = await run_in_thread(lambda events: encode_batch(adapt(events)), part)
                        else:
                            chunk = encode_batch(adapt(part))
                        if tail or type(part[-1]) in TERMINAL:  # for structs, isinstance takes four times as long
                            tail += chunk
                            continue
                        activity.last_event = part[-1]
                        if not http_request.write_now(chunk):
                            await http_request.write(chunk)
                        chunk = b""  # not held while the client reads
        return tail

    async def _stream_pages(
        self, http_request: HttpRequest, events: EventPages, dialect: OutputDialect, *, after: int | None = None
    ) -> None:
        """Send stored events, in parts that wait for the client to read.

        A client that reads slowly holds the page that it shares with others, and one part of its own.
        """
        with self._keepalive.watch(http_request, dialect.encode_keepalive, after=after) as activity:
            async with aclosing(events) as pages:
                async for page in pages:
                    adapted = dialect.adapt_events(page)
                    chunk = adapted.encode() if isinstance(adapted, EventPage) else encode_batch(adapted)
                    activity.last_event = page.last_number
                    for start in range(0, len(chunk), PART_BYTES):
                        part = chunk[start : start + PART_BYTES]
                        if not http_request.write_now(part):
                            await http_request.write(part)
                        elif len(part) == PART_BYTES:
                            await asyncio.sleep(0)  # other followers may have large pages to send, too
                    del page, adapted, chunk  # not held while the next page is awaited


async def _respond(http_request: HttpRequest, response: Response, body: bytes | None) -> None:
    """Send a response. `body` is its JSON if it is encoded already."""
    failure = encode_failed_response(response)
    if failure is None:
        if body is None and is_large():
            await http_request.respond_with(codec.reuse_tools_json(response))
            return
        if body is None:
            body = codec.encode(codec.reuse_tools_json(response))
        if not http_request.respond_now(body):
            await http_request.respond(200, body)
    else:
        if failure[0] == Unavailable.status:
            http_request.extra_headers.append(RETRY_SOON)
        await http_request.respond(*failure)
