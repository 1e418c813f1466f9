"""The serving pipeline: from a request to a prepared one, and from that to deltas.

A model call passes these stages, outermost first. Each stage is a module or package beside this one.

    hosted            run hosted tools between model calls; each of these passes the stages below
    first_delta       begin the stream when the model answers, the upstream accepts the turn, or time is up
    compaction        replace a context that is too long, or that ends in a trigger, by a summary
    routing           choose the first candidate that can serve the turn
    strict_output     check the answers of upstreams that only promise to follow a schema
    truncation        drop the oldest exchanges of a context that is too long
    tool_emulation    translate tools and output formats that the backend lacks
    sealed_reasoning  open encrypted reasoning for the backend, and seal it for the client
    the backend

A foreground request is prepared and served once. A background request is prepared when it is accepted, and prepared
again and served when its run starts, perhaps in another process. A stage that does not apply to a turn is skipped.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.backends.base import Backend, Model, QueuedBackend, Turn
from antiphon.engine.background.credentials import QueuedCredentials
from antiphon.engine.files.loader import FileServiceLoader
from antiphon.engine.observer import EngineObserver
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.media import MediaResolver
from antiphon.engine.prepare.prepare import Prepared, Preparer
from antiphon.engine.prompts import Prompts
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compactor import CompactedTurn, Compactor
from antiphon.engine.serve.first_delta import FirstDelta
from antiphon.engine.serve.hosted.journal import HostedJournal
from antiphon.engine.serve.hosted.loop import HostedLoop
from antiphon.engine.serve.routing import ModelRoute, ModelRouter, ModelStatus, Serving
from antiphon.engine.serve.sealed_reasoning import SealedReasoning
from antiphon.engine.serve.stage import Stage
from antiphon.engine.serve.strict_output import StrictOutput
from antiphon.engine.serve.tool_emulation.emulator import Emulator
from antiphon.engine.serve.tool_emulation.grammar_check import GrammarCheck
from antiphon.engine.serve.truncation import Truncation
from antiphon.errors import ContextLengthExceeded
from antiphon.store.base import Store
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import NO_SERVICES, HostedServices
from antiphon.tools.hosted.registry import NO_HOSTED_TOOLS, HostedTools

if TYPE_CHECKING:
    from antiphon.engine.telemetry import EngineTelemetry


def add_stages(name: str, backend: Backend, sealer: Sealer, grammars: GrammarCheck | None = None) -> Backend:
    """Wrap a backend in the last four stages of the list, innermost first. `Pipeline.serve` applies the others."""
    sealed = SealedReasoning(backend, name=name, sealer=sealer)
    emulated = Emulator(sealed, grammars)
    truncated = Truncation(emulated)
    return StrictOutput(truncated)


class Pipeline:
    """Prepares and serves requests. Owns the backends: `start` opens them, `close` closes them.

    `acquire` and `release` count its users. A pipeline that was replaced is closed when it has none.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        *,
        store: Store,
        prompts: Prompts,
        policy: Policy,
        sealer: Sealer,
        hosted_tools: HostedTools = NO_HOSTED_TOOLS,
        hosted_services: HostedServices = NO_SERVICES,
        files: FileServiceLoader | None = None,
    ) -> None:
        self.parts: tuple[object, ...] = (*backends.values(), hosted_tools)
        self._users = 0
        self._unused = asyncio.Event()
        self._unwrapped = backends
        self._queue_limits = policy.queue
        self._grammars = GrammarCheck(policy.grammar_limits)
        self._backends = {name: add_stages(name, backend, sealer, self._grammars) for name, backend in backends.items()}
        self._router = ModelRouter(self._backends, policy.models, unsupported=policy.unsupported_tools)
        self._hosted = HostedLoop(
            hosted_tools,
            sealer,
            services=hosted_services,
            max_calls=policy.max_hosted_calls,
            run_locally=policy.run_hosted_locally,
        )
        preparer = Preparer(
            router=self._router,
            store=store,
            prompts=prompts,
            policy=policy,
            sealer=sealer,
            grammars=self._grammars,
            hosted=self._hosted,
            media=MediaResolver(files or FileServiceLoader()),
        )
        self.prepare = preparer.prepare
        self.prepare_accepted = preparer.prepare_accepted
        self.answer_limits = policy.answer_limits
        self._compactor = Compactor(sealer)
        self._first_delta = FirstDelta()
        self.credentials = QueuedCredentials()
        self.observer: EngineObserver | None = None
        self.telemetry: EngineTelemetry | None = None

    def trace(self, telemetry: "EngineTelemetry") -> None:
        """Record every model call and every call of a hosted tool."""
        self.telemetry = self._hosted.telemetry = telemetry
        for name, outermost in self._backends.items():
            stage = outermost
            assert isinstance(stage, Stage), "every backend has stages"
            while isinstance(stage.inner, Stage):
                stage = stage.inner
            stage.inner = telemetry.wrap_backend(name, stage.inner)

    def take_over(self, replaced: "Pipeline") -> None:
        """Use the state of the pipeline that this one replaces."""
        self.credentials = replaced.credentials
        self.observer = replaced.observer
        if replaced.telemetry is not None:
            self.trace(replaced.telemetry)

    async def start(self, *, replaced: "Pipeline | None" = None) -> None:
        """Start all backends. If one fails, close those that have started.

        Parts of the pipeline that this one replaces are running already.
        """
        running = () if replaced is None else replaced.parts
        async with AsyncExitStack() as stack:
            for name, backend in self._backends.items():
                if self._unwrapped[name] not in running:
                    await backend.start()
                    stack.push_async_callback(backend.close)
            if self._hosted.tools not in running:
                await self._hosted.tools.start()
            stack.pop_all()
        for unwrapped in self._unwrapped.values():
            if isinstance(unwrapped, QueuedBackend) and unwrapped.queue is not None:
                unwrapped.queue.limits = self._queue_limits

    async def close(self, *, others: Iterable["Pipeline"] = ()) -> None:
        """Close all parts, except those that other pipelines use."""
        used = [part for other in others for part in other.parts]
        await self._grammars.close()
        if self._hosted.tools not in used:
            await self._hosted.tools.close()
        for name, backend in self._backends.items():
            if self._unwrapped[name] not in used:
                await backend.close()

    def acquire(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator["Pipeline"]:
        self.acquire()
        try:
            yield self
        finally:
            self.release()

    async def wait_until_unused(self) -> None:
        while self._users:
            self._unused.clear()
            await self._unused.wait()

    def models(self) -> Sequence[Model]:
        """Return all models that have a name, each once."""
        return self._router.models()

    def classify(self, model: str) -> ModelStatus:
        """Return the status of a model name in this process."""
        return self._router.classify(model)

    def serve(
        self,
        prepared: Prepared,
        *,
        first_delta_seconds: float | None = None,
        replayed: Sequence[Delta] = (),
        journal: HostedJournal | None = None,
    ) -> Awaitable[Serving]:
        """Start the model call of a prepared request.

        Without a time limit, this returns when the model has begun to answer. `replayed` are the deltas that an earlier
        attempt at the same response has shown. `journal` has the steps of hosted tools that it has finished.
        """
        route, turn = prepared.route, prepared.turn
        if prepared.is_hosted:
            return self._serve_hosted(prepared, first_delta_seconds, replayed, journal)
        if first_delta_seconds is None:
            return self._start(route, replayed, turn)
        start = partial(self._start, route, replayed)
        return self._first_delta.start(start, route, turn, seconds=first_delta_seconds)

    async def _serve_hosted(
        self, prepared: Prepared, seconds: float | None, replayed: Sequence[Delta], journal: HostedJournal | None
    ) -> Serving:
        route, turn = prepared.route, prepared.turn
        has_begun = turn.background

        async def start_model(turn: Turn, replayed: Sequence[Delta]) -> Serving:
            return await self._start(route, replayed, turn)

        start = partial(
            self._hosted.start,
            start_model,
            response_id=prepared.mint.response_id,
            capabilities=route.first.backend.capabilities,
            journal=journal,
            replayed=replayed,
            has_begun=lambda: has_begun,
        )
        if seconds is None:
            return await start(turn)
        serving = await self._first_delta.start(start, route, turn, seconds=seconds)
        has_begun = True  # the sessions may still be opened
        return serving

    async def _start(self, route: ModelRoute, replayed: Sequence[Delta], turn: Turn) -> Serving:
        if replayed or self._compactor.applies_to(turn):
            compacting = await self._compactor.start(route, turn, replayed=replayed)
            if compacting is not None:
                return Serving(compacting, None)
        try:
            return await route.start(turn)
        except ContextLengthExceeded as refusal:
            self._compactor.learn_refusal(route, refusal)
            raise

    async def count_tokens(self, prepared: Prepared) -> int:
        """Count the tokens that the model would read for a prepared request."""
        return await prepared.route.count_tokens(prepared.turn)

    async def compact(self, prepared: Prepared) -> CompactedTurn:
        """Compact the whole context of a prepared request. No response has its id."""
        turn = msgspec.structs.replace(prepared.turn, response_id="")
        return await self._compactor.compact(prepared.route, turn)
