"""The engine: all models, one store, and the operations of the Responses API on them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon import offload
from antiphon.backends.base import Backend, Model
from antiphon.engine.background.attempt import QueuedRequest
from antiphon.engine.background.event_reader import EventPages
from antiphon.engine.background.responses import BackgroundResponses, BackgroundRun
from antiphon.engine.background.worker import Worker
from antiphon.engine.containers.containers import Containers
from antiphon.engine.conversations import Conversations
from antiphon.engine.files.loader import FileServiceLoader, StoredImages, VectorSearch
from antiphon.engine.items import ItemPage, make_page, normalize_items
from antiphon.engine.observer import EngineObserver
from antiphon.engine.peers import Peers
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.persistence import ExpirySweeper, SessionSink, StoreSink, compute_expiry
from antiphon.engine.respond.response import begin_response
from antiphon.engine.respond.run import ResponseSink, Run, empty_answer
from antiphon.engine.respond.session import ConnectionMemory
from antiphon.engine.respond.stateless import StatelessRun
from antiphon.engine.sealing import Sealer, make_secret
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.replaced_pipelines import ReplacedPipelines
from antiphon.engine.serve.routing import Serving
from antiphon.engine.serve.sealed_reasoning import StoredReasoningSealer
from antiphon.engine.storage_quota import StorageQuota
from antiphon.engine.usage import UsageRecorder
from antiphon.errors import InvalidRequest, NotFound, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import FINAL_STATUSES, CompactedResponse, Response
from antiphon.store.base import RunKey, Store, StoredResponse
from antiphon.store.keys import KeyStore
from antiphon.tools.hosted.base import HostedServices
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools

if TYPE_CHECKING:
    from antiphon.engine.files.service import FileService
    from antiphon.engine.telemetry import EngineTelemetry


# The time for which an effect stays claimed if responses do not expire.
_CLAIM_SECONDS = 365 * 24 * 60 * 60


class Engine:
    """Serves requests. Owns its backends and its store: `start` opens them, `close` closes them.

    `files` loads the service of uploaded files. Without it, they are in a temporary folder.
    """

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        store: Store,
        policy: Policy | None = None,
        sealer: Sealer | None = None,
        files: FileServiceLoader | None = None,
        hosted_tools: HostedTools = NO_HOSTED_TOOLS,
        containers: Containers | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._files = files or FileServiceLoader(limits=self._policy.file_limits, embeddings=self._policy.embeddings)
        self.containers = containers
        if containers is not None:
            containers.get_file_service = self._files.load
        sealer = sealer or Sealer([make_secret()])
        self.backends = backends
        self._store = store
        self.usage = UsageRecorder(store, self._policy.prices)
        self._quota = StorageQuota.make(store, self._policy)
        self.conversations = Conversations(store, self._policy, self._quota)
        self.prompts = Prompts(store, max_bytes=self._policy.max_prompt_bytes)
        self.reasoning = StoredReasoningSealer(sealer)
        self.sealer = sealer
        self.hosted_tools = hosted_tools
        self._pipeline = self._make_pipeline(backends, self._policy, hosted_tools)
        self._replaced = ReplacedPipelines()
        self._running: dict[RunKey, Run] = {}
        self._starting: set[asyncio.Task[object]] = set()
        self._worker = Worker(
            store,
            self._pipeline,
            slots=self._policy.background_slots,
            lease=self._policy.background_lease_seconds,
            limits=self._policy.background_limits,
            usage=self.usage,
        )
        self._background = BackgroundResponses(
            store,
            self._worker,
            lease=self._policy.background_lease_seconds,
            limits=self._policy.background_limits,
            page_bytes=self._policy.event_page_bytes,
        )
        self._sweeper = ExpirySweeper(store)
        self._stopping = False
        self._is_draining = False
        self.ready = False
        self.has_stored_keys = False  # set at the start
        # Called at the start, before the models are loaded. An error stops the start.
        self.on_store_open: Callable[[], None] | None = None
        self._peers: Peers | None = None

    def _make_pipeline(self, backends: Mapping[str, Backend], policy: Policy, hosted_tools: HostedTools) -> Pipeline:
        return Pipeline(
            backends,
            store=self._store,
            prompts=self.prompts,
            policy=policy,
            sealer=self.sealer,
            hosted_tools=hosted_tools,
            hosted_services=HostedServices(
                claim=self._claim_effect,
                file_search=VectorSearch(self._files),
                containers=self.containers,
                images=StoredImages(self._files),
            ),
            files=self._files,
        )

    async def _claim_effect(self, project: str, key: str) -> bool:
        """Claim an effect for as long as responses are stored, so that the claims do not fill the database."""
        expires_at = compute_expiry(self._policy) or int(time.time()) + _CLAIM_SECONDS
        return await self._store.claim_effect(project, key, expires_at=expires_at)

    async def start(self) -> None:
        """Open the store and start the backends. If that fails, close all that was opened."""
        async with AsyncExitStack() as stack:
            await self._store.open()
            stack.push_async_callback(self._store.close)
            self.has_stored_keys = await self._store.has_keys()
            if self.on_store_open is not None:
                self.on_store_open()
            await self._pipeline.start()
            stack.push_async_callback(self._pipeline.close)
            if self.containers is not None:
                await self.containers.start()
                stack.push_async_callback(self.containers.close)
            await self._background.start()
            self._sweeper.start()
            self._files.start()
            stack.pop_all()
        self.ready = True

    async def reconfigure(
        self, *, backends: Mapping[str, Backend], policy: Policy, hosted_tools: HostedTools, configuration_id: str
    ) -> None:
        """Serve new requests with other backends, tools and another policy.

        Requests in progress end on the backends that they began with; those are closed after the last of them. A
        backend that is given again stays open. If a new backend cannot start, this raises and nothing has changed.
        `files`, `embeddings`, `stateless` and the lease of the policy do not change.
        """
        pipeline = self._make_pipeline(backends, policy, hosted_tools)
        await pipeline.start(after=self._pipeline)
        pipeline.follow(self._pipeline)
        self._replaced.add(self._pipeline, pipeline)
        self._pipeline = pipeline
        self._policy, self.backends, self.hosted_tools = policy, backends, hosted_tools
        self._store.configuration_id = configuration_id
        self.usage.prices = policy.prices
        self._quota = StorageQuota.make(self._store, policy)
        self.conversations.policy, self.conversations.quota = policy, self._quota
        self.prompts.max_bytes = policy.max_prompt_bytes
        self._worker.reconfigure(pipeline, slots=policy.background_slots, limits=policy.background_limits)
        self._background.limits = policy.background_limits

    async def close(self) -> None:
        self.ready = False
        try:
            await self._files.close()
            await self._sweeper.close()
            await self._background.close()
            await self._replaced.close(self._pipeline)
            await self._pipeline.close()
            await self.usage.close()
            if self.containers is not None:
                await self.containers.close()
        finally:
            await self._store.close()

    @property
    def key_store(self) -> KeyStore:
        """The API keys in the store."""
        return self._store

    @property
    def admin_store(self) -> Store:
        """The store, for the usage, the projects and the counts of limits."""
        return self._store

    @property
    def file_service(self) -> "FileService":
        """The files, uploads and vector stores."""
        return self._files.load()

    async def check_ready(self) -> None:
        """Raise Unavailable unless the models are loaded and the store can be written to."""
        if self._is_draining:
            raise Unavailable("The server is shutting down.")
        if not self.ready:
            raise Unavailable("The server is not ready.")
        await self._store.check()

    def observe(self, observer: EngineObserver) -> None:
        """Report ended responses, tokens and writes to an observer. Must be called before `start`."""
        self._pipeline.observer = observer
        self._store.on_write = observer.count_write

    def trace(self, telemetry: "EngineTelemetry") -> None:
        """Record model calls, calls of hosted tools and background work. Must be called before `start`."""
        self._pipeline.trace(telemetry)

    def connect(self, peers: Peers) -> None:
        """Cancel and retrieve foreground responses of other processes, too, and announce changes to them."""
        self._peers = peers
        if not self._store.reports_changes:
            self._background.announce_change = peers.announce_change

    def receive_change(self, kind: str, response_id: str) -> None:
        """Handle a change that another process has announced."""
        self._background.receive_change(kind, response_id)

    @property
    def refusals(self) -> dict[str, int]:
        """The number of requests that were refused by a limit of their project, by the name of the limit."""
        stored = 0 if self._quota is None else self._quota.refusals
        counts = {"queued": self._background.refusals, "stored_bytes": stored}
        return {name: count for name, count in counts.items() if count}

    @property
    def foreground_count(self) -> int:
        """The number of foreground responses in progress, including those whose model has not begun to answer."""
        return len(self._running) + len(self._starting)

    @property
    def background_count(self) -> int:
        """The number of background responses that this process works on."""
        return self._background.count

    async def count_waiting(self) -> int:
        """Return the number of background responses in the store that no process works on."""
        return await self._store.count_waiting()

    def models(self) -> Sequence[Model]:
        return self._pipeline.models()

    async def create(
        self, request: CreateRequest, *, project: str, key_id: str = "", session: ConnectionMemory | None = None
    ) -> Run | BackgroundRun:
        """Begin a response. Raises for every error that is known before the stream begins.

        Its usage is counted for the key `key_id`. A request on a connection with a memory brings its `session`. A
        response that the request fails to continue is removed from it.
        """
        pipeline = self._pipeline
        pipeline.acquire()
        try:
            run = await self._create(pipeline, request, project, key_id, session)
        except BaseException as error:
            pipeline.release()
            if session is not None and isinstance(error, Exception):
                session.forget(request.previous_response_id)
            raise
        if isinstance(run, BackgroundRun):
            pipeline.release()
        else:
            run.on_end(pipeline.release)
        return run

    async def _create(
        self, pipeline: Pipeline, request: CreateRequest, project: str, key_id: str, session: ConnectionMemory | None
    ) -> Run | BackgroundRun:
        # A reload may replace the pipeline at any await: only the one that was acquired stays open.
        if self._stopping:
            raise Unavailable("The server is shutting down.")
        if self._store.failure is not None and (request.store is not False or request.background):
            await self._store.check()  # refuse the request before the model is called
        if self._quota is not None and (request.store is not False or request.background):
            await self._quota.check(project)
        prepared = await pipeline.prepare(request, project=project, session=session)
        if prepared.turn.request.background:
            return await self._enqueue(prepared, project, key_id)
        if request.generate is False:
            serving = Serving(empty_answer(), None)
        else:
            serving = await self._serve(pipeline, prepared)
        return self._run(prepared, serving, project, key_id, session)

    async def _serve(self, pipeline: Pipeline, prepared: Prepared) -> Serving:
        """Start the model call of a request. Until the response begins, `stop_runs` cancels the call."""
        if self._stopping:
            raise Unavailable("The server is shutting down.")
        # A stream can report an error later, so it need not wait until the model answers.
        seconds = self._policy.first_delta_seconds if prepared.turn.streamed else None
        task = asyncio.current_task()
        assert task is not None
        self._starting.add(task)
        try:
            return await pipeline.serve(prepared, first_delta_seconds=seconds)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            task.uncancel()
            raise Unavailable("The server is shutting down.") from None
        finally:
            self._starting.discard(task)

    def _run(
        self, prepared: Prepared, serving: Serving, project: str, key_id: str, session: ConnectionMemory | None
    ) -> Run:
        sink: ResponseSink = StoreSink(self._store, self._policy, project=project, input_items=prepared.input)
        if session is not None:
            sink = SessionSink(sink, session, prepared)
        make_run = StatelessRun if self._policy.stateless else Run
        run = make_run(
            begin_response(prepared, serving.candidate),
            serving.deltas,
            sink,
            request=prepared.turn.request,
            mint=prepared.mint,
            warnings=_join_warnings(serving.warnings, prepared.warnings),
            limits=self._policy.answer_limits,
        )
        key = RunKey(project, run.response.id)
        self._running[key] = run
        run.on_end(lambda: self._running.pop(key, None))
        observer = self._pipeline.observer
        if observer is not None:
            run.on_end(lambda: observer.count_response(run.response))
        run.on_end(lambda: self.usage.record_response(project, key_id, run.response, prepared))
        return run

    async def _enqueue(self, prepared: Prepared, project: str, key_id: str) -> BackgroundRun:
        response = msgspec.structs.replace(begin_response(prepared), status="queued")
        key = RunKey(project, response.id)
        request = self._pipeline.credentials.withhold(key, prepared.turn.request)
        telemetry = self._pipeline.telemetry
        traceparent = "" if telemetry is None else telemetry.format_traceparent()
        queued = QueuedRequest(request=request, minted=prepared.mint.minted, traceparent=traceparent, key_id=key_id)
        stored = StoredResponse(response=response, input=prepared.input, expires_at=compute_expiry(self._policy))
        await self._background.enqueue(project, stored, await offload.run(codec.encode, queued))
        return BackgroundRun(response, prepared.warnings, lambda: self._background.follow(key, -1))

    async def count_input_tokens(self, request: CreateRequest, *, project: str) -> tuple[int, Sequence[str]]:
        """Count the tokens that the model would read for a request. Return the count and warnings."""
        with self._pipeline.in_use() as pipeline:
            prepared = await pipeline.prepare(request, project=project)
            return await pipeline.count_tokens(prepared), prepared.warnings

    async def compact(
        self, request: CreateRequest, *, project: str, key_id: str = ""
    ) -> tuple[CompactedResponse, Sequence[str]]:
        """Compact the input of a request and the context it continues. Return the result and warnings."""
        with self._pipeline.in_use() as pipeline:
            prepared = await pipeline.prepare(request, project=project, repair=True)
            compacted = await pipeline.compact(prepared)
        if self._pipeline.observer is not None:
            self._pipeline.observer.count_tokens(prepared.turn.request.model or "", compacted.usage)
        if compacted.usage is not None:
            self.usage.record(project, key_id, prepared.turn.request.model or "", compacted.usage)
        mint = prepared.mint
        output = await offload.run(normalize_items, (*compacted.retained, compacted.item), mint)
        # The result is not stored, so its id must not look like the id of a response.
        response = CompactedResponse(
            id=mint.new_id("compact"), created_at=prepared.created_at, output=output, usage=compacted.usage
        )
        return response, prepared.warnings

    async def cancel(self, project: str, response_id: str) -> Response:
        """Cancel a response and return it. A background or cancelled response that has ended is returned unchanged.

        Raises InvalidRequest for a foreground response that has ended.
        """
        key = RunKey(project, response_id)
        cancelled = await self.cancel_foreground(project, response_id)
        if cancelled is not None:
            return cancelled
        stored = await self._store.load(project, response_id)
        if stored is None:
            cancelled = None if self._peers is None else await self._peers.cancel(project, response_id)
            if cancelled is None:
                raise _not_found(response_id)
            return cancelled
        if stored.response.status in FINAL_STATUSES:
            if not stored.response.background and stored.response.status != "cancelled":
                raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id", code="invalid_value")
            return stored.response
        await self._background.cancel(key)
        return (await self._load(project, response_id)).response

    async def cancel_foreground(self, project: str, response_id: str) -> Response | None:
        """Cancel a foreground response of this process, and return it. None if there is no such response."""
        run = self._running.get(RunKey(project, response_id))
        if run is None:
            return None
        await run.cancel_and_wait()
        return run.response

    def find_foreground(self, project: str, response_id: str) -> Response | None:
        """Return a foreground response of this process that will be stored, as it began."""
        run = self._running.get(RunKey(project, response_id))
        return run.begun if run is not None and run.begun.store else None

    async def follow(self, project: str, response_id: str, *, after: int) -> EventPages:
        """Return the events of a background response after this sequence number: the stored ones, then new ones."""
        response = await self._store.load_bare_response(project, response_id)
        if response is None:
            raise _not_found(response_id)
        if not response.background:
            raise InvalidRequest(
                "Only the stream of a background response can be resumed: create it with 'background: true'.",
                param="stream",
                code="invalid_value",
            )
        return self._background.follow(RunKey(project, response_id), after)

    def start_draining(self) -> None:
        """Report that the server is not ready, and claim no more background runs. Requests are still served."""
        self._is_draining = True
        self._worker.stop_claiming()

    async def wait_for_background(self) -> None:
        """Wait until this process works on no background response, or `stop_runs` is called."""
        while self._worker.attempts and not self._stopping:
            await self._worker.changed.wait()

    def stop_runs(self) -> None:
        """Refuse new requests, and end the running ones with a terminal event. Background runs stay queued."""
        self._stopping = True
        self._background.stop_readers()
        for run in tuple(self._running.values()):
            run.stop()
        for task in self._starting:
            task.cancel()

    async def retrieve(self, project: str, response_id: str) -> Response:
        """Return the current state of a response. A foreground response is stored when it ends."""
        response = await self._store.load_response(project, response_id)
        response = response or self.find_foreground(project, response_id)
        if response is None and self._peers is not None:
            # It may have ended, and been stored, since the store was read.
            response = await self._peers.retrieve(project, response_id)
            response = response or await self._store.load_response(project, response_id)
        if response is None:
            raise _not_found(response_id)
        return response

    async def delete(self, project: str, response_id: str) -> None:
        if not await self._store.delete(project, response_id):
            raise _not_found(response_id)
        self._background.stop(RunKey(project, response_id))

    async def input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ItemPage:
        """Return a page of the response's own input items."""
        rows = await self._store.list_input_items(project, response_id, after=after, limit=limit, order=order)
        if rows is None:
            raise _not_found(response_id)
        return make_page(rows.items, has_more=rows.has_more)

    async def _load(self, project: str, response_id: str) -> StoredResponse:
        stored = await self._store.load(project, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _join_warnings(first: Sequence[str], then: Sequence[str]) -> Sequence[str]:
    return list(dict.fromkeys((*first, *then))) if first else then


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")
