"""Agents without a server: the engine runs in this process, in a thread of its own.

`EngineThread` is also used by `antiphon chat` (`cli/local_engine.py`).
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar, Unpack, overload

from antiphon.agent import agent
from antiphon.agent.definition import ConversationState
from antiphon.agent.limits import Limits, Prices
from antiphon.agent.transports.base import Events, Transport
from antiphon.agent.typed_output import OutputMode
from antiphon.errors import Unavailable
from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown
from antiphon.tasks import cancel_tasks

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from antiphon.agent.guardrails import CallGuardrail, InputGuardrail, OutputGuardrail, ResultGuardrail
    from antiphon.agent.handoffs import Handoff, InputFilter
    from antiphon.engine.engine import Engine

    DepsT = TypeVar("DepsT")

    class AgentOptions(TypedDict, Generic[DepsT], total=False):
        """The options of an agent besides its model and the type of its output."""

        base_url: str | None
        api_key: str | None
        transport: Transport | None
        name: str
        instructions: agent.Instructions[DepsT] | None
        tools: agent.Tools[DepsT]
        deps_type: type[DepsT] | None
        output_mode: OutputMode
        limits: Limits | None
        prices: Prices | None
        conversation_state: ConversationState
        settings: Mapping[str, Any] | None
        hooks: Sequence[agent.Hook[DepsT]] | None
        turn_retries: int
        output_retries: int
        history_filter: InputFilter | None
        handoffs: Sequence[agent.Agent[Any, Any] | Handoff]
        input_guardrails: Sequence[InputGuardrail]
        output_guardrails: Sequence[OutputGuardrail]
        call_guardrails: Sequence[CallGuardrail]
        result_guardrails: Sequence[ResultGuardrail]
        state: ConversationState | None


T = TypeVar("T")
Batch: TypeAlias = Sequence[Event | Unknown]


class Agent(agent.Agent[agent.DepsT_contra, agent.OutputT_co]):
    __doc__ = f"""{agent.Agent.__doc__}
    Without a `base_url` or a `transport`, the model runs in this process, as configured in the settings.
    """

    if TYPE_CHECKING:
        # The second one is for unions and other types that are not classes, the third for checkers without TypeForm.

        @overload
        def __init__(
            self,
            *,
            model: str,
            output_type: type[agent.OutputT_co] | None = None,
            **options: Unpack[AgentOptions[agent.DepsT_contra]],
        ) -> None: ...

        @overload
        def __init__(
            self,
            *,
            model: str,
            output_type: "TypeForm[agent.OutputT_co]",
            **options: Unpack[AgentOptions[agent.DepsT_contra]],
        ) -> None: ...

        @overload
        def __init__(
            self: "Agent[agent.DepsT_contra, Any]",
            *,
            model: str,
            output_type: Any,
            **options: Unpack[AgentOptions[agent.DepsT_contra]],
        ) -> None: ...

        def __init__(self, **options: Any) -> None: ...

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        return InProcessTransport() if base_url is None else super()._connect(base_url, api_key)


class InProcessTransport:
    """A transport to an engine in this process, which the first request starts.

    An engine belongs to one event loop, and a model is too large to load it for each: all transports with the same
    settings, and all event loops that use them, share one engine thread. The engine is closed when the last event loop
    closes the last transport.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[asyncio.AbstractEventLoop] = set()
        self._shared: _SharedEngine | None = None
        self._finalizer: weakref.finalize[..., InProcessTransport] | None = None

    async def stream(self, request: dict[str, Any]) -> Events:
        with self._lock:
            self._users = {loop for loop in self._users if not loop.is_closed()} | {asyncio.get_running_loop()}
            if self._shared is None:
                self._shared = _acquire_engine()
                # A transport that is never closed must not hold a model forever.
                self._finalizer = weakref.finalize(self, self._shared.release_later)
                self._finalizer.atexit = False
            reader = _ResponseReader(self._shared.thread, request)
        return await reader.open()

    async def close(self) -> None:
        """Release the engine for this event loop. The last event loop that has used it closes it."""
        with self._lock:
            self._users.discard(asyncio.get_running_loop())
            self._users = {loop for loop in self._users if not loop.is_closed()}
            if self._users or self._shared is None or self._finalizer is None:
                return
            shared, self._shared = self._shared, None
            self._finalizer.detach()
            is_closing = shared.release()
        if is_closing:
            await asyncio.wrap_future(shared.thread.closed)


class _SharedEngine:
    """The engine thread of all transports with the same `identity`: the settings, and what they depend on."""

    def __init__(self, identity: object, *, after: Future[None] | None) -> None:
        self.identity = identity
        self.thread = EngineThread(_build_engine, after=after)
        self.user_count = 0

    def release(self) -> bool:
        """Stop using the engine. Return True if this was the last user, so that it is closed."""
        with _engines_lock:
            self.user_count -= 1
            if self.user_count:
                return False
        self.thread.close()
        return True

    def release_later(self) -> None:
        """Stop using the engine, from the garbage collector, which may interrupt a holder of the lock."""
        self.thread.loop.call_soon_threadsafe(self.release)


_engines_lock = threading.Lock()
_engines: list[_SharedEngine] = []


def _acquire_engine() -> _SharedEngine:
    """Return the engine for the current settings, for one more user. Raises ConfigError for invalid settings."""
    from antiphon.config.loading import environment, load

    # Settings can contain paths relative to the working directory. Threads do not survive a fork.
    identity = (load(None, environment(), {}), Path.cwd(), os.getpid())
    with _engines_lock:
        _engines[:] = [each for each in _engines if each.user_count or not each.thread.closed.done()]
        equal = [each for each in _engines if each.identity == identity]
        if not equal or not equal[-1].user_count:
            equal.append(_SharedEngine(identity, after=equal[-1].thread.closed if equal else None))
            _engines.append(equal[-1])
        equal[-1].user_count += 1
        return equal[-1]


class EngineThread:
    """An event loop in a daemon thread, and an engine on it.

    `build` makes the engine; `get_engine` starts it at the first call. `after` is awaited first: two engines at once
    would compete for memory and files. `closed` is done when the engine is closed and the loop has ended.
    """

    def __init__(self, build: "Callable[[], Engine]", *, after: Future[None] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.closed: Future[None] = Future()
        self.closed.set_running_or_notify_cancel()  # a waiter that gives up cannot cancel it
        self._build = build
        self._closing = asyncio.Event()
        self._starting: asyncio.Task[Engine] | None = None
        self._cancels_start = False
        self._tasks: set[asyncio.Task[Any]] = set()
        threading.Thread(target=self._run, args=(after,), name="antiphon-engine", daemon=True).start()

    def close(self, *, cancel_start: bool = False) -> None:
        """Request the end, from any thread: cancel the tasks, close the engine, end the loop.

        An engine that is starting is started first and then closed, or is discarded with `cancel_start`.
        """
        self._cancels_start |= cancel_start
        self.loop.call_soon_threadsafe(self._closing.set)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, from any other thread. Closing cancels it."""
        return asyncio.run_coroutine_threadsafe(self._track(work), self.loop)

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task, from the loop itself. Closing cancels it."""
        return self.loop.create_task(self._track(work))

    async def get_engine(self) -> "Engine":
        """Return the started engine. Must run on the loop. After a failed start the next call tries again."""
        if self._starting is None or _has_failed(self._starting):
            self._starting = self.loop.create_task(self._start())
        # Several requests may wait for the start: cancelling one of them must not cancel it.
        return await asyncio.shield(self._starting)

    async def _start(self) -> "Engine":
        engine = self._build()
        await engine.start()
        return engine

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def _run(self, after: Future[None] | None) -> None:
        if after is not None:
            wait((after,))
        try:
            try:
                self.loop.run_until_complete(self._serve())
                self.loop.run_until_complete(_cancel_all_others())
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            finally:
                # Threads of the default executor are not awaited: one that hangs must not block the end.
                self.loop.close()
        except BaseException as error:
            self.closed.set_exception(error)
        else:
            self.closed.set_result(None)

    async def _serve(self) -> None:
        await self._closing.wait()
        await cancel_tasks(*self._tasks)
        if self._starting is None or _has_failed(self._starting):
            return
        if self._cancels_start and not self._starting.done():
            await cancel_tasks(self._starting)
            return
        await (await self._starting).close()


class _ResponseReader:
    """Reads the events of one request on the engine's loop and passes them to the loop of the caller.

    One task reads them all. The queue gets the batches and at the end the task itself.
    """

    _task: asyncio.Task[None]

    def __init__(self, thread: EngineThread, request: dict[str, Any]) -> None:
        self._thread = thread
        self._request = request
        self._caller_loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Batch | asyncio.Task[None]] = asyncio.Queue()
        thread.loop.call_soon_threadsafe(self._start)

    async def open(self) -> Events:
        """Return the events. Raises if the engine rejects the request."""
        events = self._iterate()
        await anext(events)  # an empty batch: the engine has accepted the request
        return events

    def _start(self) -> None:
        self._task = self._thread.create_task(self._read())
        self._task.add_done_callback(self._put)

    def _put(self, element: "Batch | asyncio.Task[None]") -> None:
        with suppress(RuntimeError):  # the loop of the caller may have ended
            self._caller_loop.call_soon_threadsafe(self._queue.put_nowait, element)

    async def _read(self) -> None:
        from antiphon.agent.transports.engine import LocalTransport

        engine = await self._thread.get_engine()
        async with aclosing(await LocalTransport(engine).stream(self._request)) as events:
            self._put(())
            async for batch in events:
                self._put(batch)

    def _cancel(self) -> None:
        self._task.cancel()

    async def _iterate(self) -> Events:
        ended = False
        try:
            while not isinstance(element := await self._queue.get(), asyncio.Task):
                yield element
            ended = True
            if element.cancelled():
                raise Unavailable("The agent was closed during the request.")
            element.result()
        finally:
            if not ended:
                await self._stop()

    async def _stop(self) -> None:
        """Stop the model and wait for its end."""
        with suppress(RuntimeError):  # the engine's loop may have ended, and the task before it
            self._thread.loop.call_soon_threadsafe(self._cancel)
        while not isinstance(await self._queue.get(), asyncio.Task):
            pass


def _has_failed(starting: "asyncio.Task[Engine]") -> bool:
    return starting.done() and (starting.cancelled() or starting.exception() is not None)


def _build_engine() -> "Engine":
    # The engine takes long to import. Agents that use a server do not need it.
    from antiphon.config.loading import environment, load
    from antiphon.engine.assembly import build_engine

    return build_engine(load(None, environment(), {}))


async def _cancel_all_others() -> None:
    await cancel_tasks(*(asyncio.all_tasks() - {asyncio.current_task()}))
