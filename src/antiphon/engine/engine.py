"""The engine: all models, one store, and the operations of the Responses API on them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
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
from antiphon.engine.expiry import ExpirySweeper, claim_effect, compute_expiry
from antiphon.engine.files.loader import FileServiceLoader, StoredImages, VectorSearch
from antiphon.engine.foreground import ForegroundResponses, make_unknown_response_error
from antiphon.engine.items import ItemPage, make_page, normalize_items
from antiphon.engine.node_settings import NodeSettings
from antiphon.engine.observer import EngineObserver
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.history import may_load_items
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.prepare.toolset import explain_inherited_tools
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.engine.respond.persistence import ConnectionSink, StoreSink
from antiphon.engine.respond.response import begin_response, join_warnings
from antiphon.engine.respond.run import ResponseSink, Run, empty_answer
from antiphon.engine.respond.stateless import StatelessRun
from antiphon.engine.sealing import Sealer, make_secret
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.engine.serve.replaced_pipelines import ReplacedPipelines
from antiphon.engine.serve.routing import Serving
from antiphon.engine.serve.sealed_reasoning import StoredReasoningSealer
from antiphon.engine.storage_quota import StorageQuota, stores_data
from antiphon.engine.usage import UsageRecorder, find_model
from antiphon.errors import AntiphonError, InvalidRequest, Unavailable
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import FINAL_STATUSES, CompactedResponse, Response
from antiphon.store.base import RunKey, Store, StoredResponse
from antiphon.store.changes import Announce, Change
from antiphon.store.encoded_response import EncodedResponse
from antiphon.store.history_budget import HistoryBudget, HistoryShare
from antiphon.store.keys import KeyStore
from antiphon.store.peer_link import PeerLink
from antiphon.tools.hosted.base import HostedServices
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools

if TYPE_CHECKING:
    from antiphon.engine.files.service import FileService
    from antiphon.engine.telemetry import EngineTelemetry


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
        self.usage = UsageRecorder(store, self._policy.prices, sealer=sealer)
        self._quota = StorageQuota.make(store, self._policy)
        self._histories = HistoryBudget(self._policy.history_budget_bytes, self._policy.history_wait_seconds)
        self.conversations = Conversations(store, self._policy, self._quota, self._histories)
        self.prompts = Prompts(store, max_bytes=self._policy.max_prompt_bytes)
        self.reasoning = StoredReasoningSealer(sealer)
        self.sealer = sealer
        self.hosted_tools = hosted_tools
        self._pipeline = self._make_pipeline(backends, self._policy, hosted_tools)
        self._replaced = ReplacedPipelines()
        self._foreground = ForegroundResponses(store, lease=self._policy.background_lease_seconds)
        self._worker = Worker(
            store,
            self._pipeline,
            slots=self._policy.background_slots,
            lease=self._policy.background_lease_seconds,
            limits=self._policy.background_limits,
            usage=self.usage,
            histories=self._histories,
        )
        self._background = BackgroundResponses(
            store,
            self._worker,
            lease=self._policy.background_lease_seconds,
            limits=self._policy.background_limits,
            page_bytes=self._policy.event_page_bytes,
        )
        self._sweeper = ExpirySweeper(store)
        self._is_draining = False
        self.ready = False
        self.has_stored_keys = False  # set at the start
        self.unclosed = ["store"]  # the parts that `close` has not closed yet
        # Called at the start, before the models are loaded. An error stops the start.
        self.on_store_open: Callable[[], None] | None = None
        self.node_settings = NodeSettings()

    def _make_pipeline(self, backends: Mapping[str, Backend], policy: Policy, hosted_tools: HostedTools) -> Pipeline:
        return Pipeline(
            backends,
            store=self._store,
            prompts=self.prompts,
            policy=policy,
            sealer=self.sealer,
            hosted_tools=hosted_tools,
            hosted_services=HostedServices(
                claim=lambda project, key: claim_effect(self._store, self._policy, project, key),
                file_search=VectorSearch(self._files),
                containers=self.containers,
                images=StoredImages(self._files),
            ),
            files=self._files,
        )

    async def start(self) -> None:
        """Open the store and start the backends. If that fails, close all that was opened."""
        async with AsyncExitStack() as stack:
            await self._store.open()
            stack.push_async_callback(self._store.close)
            if self._store.peer_link is not None:
                self._foreground.connect(self._store.peer_link)
                self.node_settings.start(self._store.peer_link)
                stack.push_async_callback(self.node_settings.close)
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
        backend that is among the new ones stays open. If a new backend cannot start, this raises and nothing has
        changed. `files`, `embeddings`, `stateless` and the lease of the policy do not change.
        """
        pipeline = self._make_pipeline(backends, policy, hosted_tools)
        await pipeline.start(replaced=self._pipeline)
        pipeline.take_over(self._pipeline)
        self._replaced.add(self._pipeline, pipeline)
        self._pipeline = pipeline
        self._policy, self.backends, self.hosted_tools = policy, backends, hosted_tools
        self._store.configuration_id = configuration_id
        self.usage.prices = policy.prices
        self._quota = StorageQuota.make(self._store, policy)
        self.conversations.policy, self.conversations.quota = policy, self._quota
        self.prompts.max_bytes = policy.max_prompt_bytes
        self._histories.reconfigure(policy.history_budget_bytes, wait_seconds=policy.history_wait_seconds)
        self._worker.reconfigure(pipeline, slots=policy.background_slots, limits=policy.background_limits)
        self._background.limits = policy.background_limits

    async def close(self) -> None:
        self.ready = False
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "node settings": self.node_settings.close,
            "files": self._files.close,
            "expiry": self._sweeper.close,
            "background responses": self._background.close,
            "backends": self._close_backends,
            "usage": self.usage.close,
        }
        if self.containers is not None:
            parts["containers"] = self.containers.close
        self.unclosed = [*parts, "store"]
        try:
            for name, close in parts.items():
                await close()
                self.unclosed.remove(name)
        finally:
            await self._store.close()
            self.unclosed.remove("store")

    async def _close_backends(self) -> None:
        await self._replaced.close(self._pipeline)
        await self._pipeline.close()

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

    def connect(self, link: PeerLink, announce: Announce) -> None:
        """Cancel and retrieve foreground responses of other processes, too, and announce changes to them."""
        self._foreground.connect(link)
        self._background.announce_elsewhere = announce

    def receive_change(self, change: Change) -> None:
        """Handle a change by another process."""
        self._background.receive_change(change)

    @property
    def owner(self) -> str:
        """The name under which this process works on background responses."""
        return self._background.owner

    @property
    def refusals(self) -> dict[str, int]:
        """The number of requests that were refused by a limit of their project, by the name of the limit."""
        stored = 0 if self._quota is None else self._quota.refusals
        counts = {"queued": self._background.refusals, "stored_bytes": stored}
        return {name: count for name, count in counts.items() if count}

    @property
    def foreground_count(self) -> int:
        """The number of foreground responses in progress, including those whose model has not begun to answer."""
        return self._foreground.count

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
        self,
        request: CreateRequest,
        *,
        project: str,
        key_id: str = "",
        memory: ConnectionMemory | None = None,
    ) -> Run | BackgroundRun:
        """Begin a response. Raises for every error that is known before the stream begins.

        The usage is counted for the key `key_id`. A request on a WebSocket brings the `memory` of its connection. A
        response that the request fails to continue is removed from it.
        """
        pipeline = self._pipeline
        pipeline.acquire()
        share = self._histories.open(project) if may_load_items(request) else None
        try:
            run = await self._create(pipeline, request, project, key_id, memory, share)
        except BaseException as error:
            _release(pipeline, share)
            if memory is not None and isinstance(error, Exception):
                memory.forget(request.previous_response_id)
            raise
        if isinstance(run, BackgroundRun):
            _release(pipeline, share)
        else:
            run.on_end(partial(_release, pipeline, share))
        return run

    async def _create(
        self,
        pipeline: Pipeline,
        request: CreateRequest,
        project: str,
        key_id: str,
        memory: ConnectionMemory | None,
        share: HistoryShare | None,
    ) -> Run | BackgroundRun:
        # A reload may replace the pipeline at any await: only the one that was acquired stays open.
        self._foreground.check_accepting()
        if (self._store.failure is not None or self._quota is not None) and stores_data(request):
            if self._store.failure is not None:
                await self._store.check()  # refuse the request before the model is called
            if self._quota is not None:
                await self._quota.check(project)
        prepared = await pipeline.prepare(request, project=project, memory=memory, share=share)
        if prepared.turn.request.background:
            return await self._enqueue(prepared, project, key_id)
        if request.generate is False:
            serving = Serving(empty_answer(), None)
        else:
            # A stream can report an error later, so it need not wait until the model answers.
            seconds = self._policy.first_delta_seconds if prepared.turn.streamed else None
            try:
                serving = await self._foreground.serve(pipeline, prepared, first_delta_seconds=seconds)
            except asyncio.CancelledError:
                self.usage.record_unanswered(project, key_id, prepared)
                raise
            except AntiphonError as error:
                if prepared.inherits_tools:
                    explain_inherited_tools(error)
                raise
        run = self._make_run(prepared, project, memory, serving)
        self._foreground.add(project, run)
        self._record_end(prepared, project, key_id, run)
        return run

    def _make_run(self, prepared: Prepared, project: str, memory: ConnectionMemory | None, serving: Serving) -> Run:
        # A stream encodes its response within its last event.
        encoded = None if prepared.turn.streamed else EncodedResponse()
        sink: ResponseSink = StoreSink(
            self._store,
            self._policy,
            project=project,
            input_items=prepared.input,
            has_own_ids=prepared.has_own_ids,
            encoded=encoded,
        )
        if memory is not None:
            sink = ConnectionSink(sink, memory, prepared)
        make_run = StatelessRun if self._policy.stateless else Run
        return make_run(
            begin_response(prepared, serving.candidate),
            serving.deltas,
            sink,
            request=prepared.turn.request,
            mint=prepared.mint,
            warnings=join_warnings(serving.warnings, prepared.warnings),
            limits=self._policy.answer_limits,
            encoded=encoded,
            input_items=prepared.input,
        )

    def _record_end(self, prepared: Prepared, project: str, key_id: str, run: Run) -> None:
        """Count a run and its usage when it ends."""
        observer = self._pipeline.observer
        if observer is not None:
            run.on_end(lambda: observer.count_response(run.response, find_model(run.response, prepared)))
        run.on_end(lambda: self.usage.record_run(project, key_id, run, prepared))

    async def _enqueue(self, prepared: Prepared, project: str, key_id: str) -> BackgroundRun:
        response = msgspec.structs.replace(begin_response(prepared), status="queued")
        key = RunKey(project, response.id)
        request = self._pipeline.credentials.withhold(key, prepared.turn.request)
        telemetry = self._pipeline.telemetry
        traceparent = "" if telemetry is None else telemetry.format_traceparent()
        queued = QueuedRequest(request=request, minted=prepared.mint.minted, traceparent=traceparent, key_id=key_id)
        stored = StoredResponse(response=response, input=prepared.input, expires_at=compute_expiry(self._policy))
        return BackgroundRun(response, prepared.warnings, await self._background.enqueue(key, stored, queued))

    async def count_input_tokens(self, request: CreateRequest, *, project: str) -> tuple[int, Sequence[str]]:
        """Count the tokens that the model would read for a request. Return the count and warnings."""
        with self._pipeline.in_use() as pipeline, self._histories.open(project) as share:
            prepared = await pipeline.prepare(request, project=project, share=share)
            return await pipeline.count_tokens(prepared), prepared.warnings

    async def compact(
        self, request: CreateRequest, *, project: str, key_id: str = ""
    ) -> tuple[CompactedResponse, Sequence[str]]:
        """Compact the input of a request and the context it continues. Return the result and warnings."""
        with self._pipeline.in_use() as pipeline, self._histories.open(project) as share:
            prepared = await pipeline.prepare(request, project=project, repair=True, share=share)
            try:
                compacted = await pipeline.compact(prepared)
            except asyncio.CancelledError:
                self.usage.record_unanswered(project, key_id, prepared)
                raise
        model = prepared.route.first.model.id if compacted.served is None else compacted.served.model
        if self._pipeline.observer is not None:
            self._pipeline.observer.count_tokens(model, compacted.usage)
        self.usage.record(project, key_id, model, compacted.usage)
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
        cancelled = await self._foreground.cancel(project, response_id)
        if cancelled is not None:
            return cancelled
        stored = await self._store.load(project, response_id)
        if stored is None:
            unanswered: Unavailable | None = None
            try:
                cancelled = await self._foreground.cancel_elsewhere(project, response_id)
            except Unavailable as error:
                unanswered = error
            if cancelled is not None:
                return cancelled
            stored = await self._store.load(project, response_id)  # it may have ended meanwhile
            if stored is None:
                raise unanswered or make_unknown_response_error(response_id)
        if stored.response.status in FINAL_STATUSES:
            if not stored.response.background and stored.response.status != "cancelled":
                raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id", code="invalid_value")
            return stored.response
        await self._background.cancel(RunKey(project, response_id))
        return await self.retrieve(project, response_id)

    async def follow(self, project: str, response_id: str, *, after: int) -> EventPages:
        """Return the events of a background response after this sequence number: the stored ones, then new ones."""
        response = await self._store.load_bare_response(project, response_id)
        response = response or await self._foreground.find(project, response_id)
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
        while self._worker.attempts and not self._foreground.is_stopping:
            await self._worker.changed.next.wait()

    def stop_runs(self) -> None:
        """Refuse new requests, and end the running ones with a terminal event. Background runs stay queued."""
        self._foreground.stop()
        self._background.stop_readers()

    async def retrieve(self, project: str, response_id: str) -> Response:
        """Return the current state of a response. A foreground response is stored when it ends."""
        response = await self._store.load_response(project, response_id)
        if response is not None and response.background and response.status == "in_progress":
            return await self._background.add_finished_items(RunKey(project, response_id), response)
        return response or await self._foreground.find(project, response_id)

    async def delete(self, project: str, response_id: str) -> None:
        """Delete a response. One that is in progress is stopped."""
        if not await self._store.delete(project, response_id):
            await self._foreground.delete(project, response_id)
        self._background.stop(RunKey(project, response_id))

    async def input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ItemPage:
        """Return a page of the response's own input items."""
        rows = await self._store.list_input_items(project, response_id, after=after, limit=limit, order=order)
        if rows is None:
            rows = await self._foreground.list_input_items(project, response_id, after=after, limit=limit, order=order)
        return make_page(rows.items, has_more=rows.has_more)


def _release(pipeline: Pipeline, share: HistoryShare | None) -> None:
    pipeline.release()
    if share is not None:
        share.close()
