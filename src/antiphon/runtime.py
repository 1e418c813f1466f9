"""Agents without a server: the engine of the settings, started in this process when the first request needs it."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from antiphon.agent import agent
from antiphon.agent.transports.base import Events, Transport
from antiphon.errors import Unavailable
from antiphon.protocol.events import Event
from antiphon.protocol.unions import Unknown

if TYPE_CHECKING:
    from antiphon.engine.engine import Engine

Batch: TypeAlias = Sequence[Event | Unknown]


class InProcess:
    """A transport that brings its own engine: started at the first request, closed with the transport.

    An engine belongs to one event loop, and a model is too large to have one for each: it has a loop of its own, in a
    thread, and all that use this transport share it. It is closed when the last of their loops closes the transport.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[asyncio.AbstractEventLoop] = set()
        self._home: _Home | None = None
        self._left: Future[None] | None = None
        self._leave: weakref.finalize[..., InProcess] | None = None

    async def stream(self, request: dict[str, Any]) -> Events:
        with self._lock:
            self._users = {each for each in self._users if not each.is_closed()} | {asyncio.get_running_loop()}
            if self._home is None:
                self._home = _Home(after=self._left)
                # Whoever forgets to close it shall not keep a model for ever.
                self._leave = weakref.finalize(self, self._home.leave)
                self._leave.atexit = False
            reading = _Reading(self._home, request)
        return await reading.open()

    async def close(self) -> None:
        """Say that this event loop is done with it: the engine goes with the last one that has used it."""
        with self._lock:
            self._users.discard(asyncio.get_running_loop())
            self._users = {each for each in self._users if not each.is_closed()}
            if self._users or self._home is None or self._leave is None:
                return
            left = self._left = self._home.left
            self._home = None
            self._leave()
        await asyncio.wrap_future(left)


class _Home:
    """An event loop in a thread of its own, and the engine on it."""

    def __init__(self, *, after: Future[None] | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.left: Future[None] = Future()
        self.left.set_running_or_notify_cancel()  # whoever waits for it may give up, and it is told nevertheless
        self._leaving = asyncio.Event()
        self._starting: asyncio.Task[Engine] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._live, args=(after,), name="antiphon-engine", daemon=True).start()

    def leave(self) -> None:
        """From any thread: close the engine, and end. `left` tells when that is done."""
        self.loop.call_soon_threadsafe(self._leaving.set)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """On this loop: begin what ends with it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def find_engine(self) -> "Engine":
        """On this loop: the engine. One that could not be started is tried again."""
        if self._starting is None or _has_failed(self._starting):
            self._starting = asyncio.ensure_future(_start())
        # Several requests may wait for it: one that is cancelled must not take it from the others.
        return await asyncio.shield(self._starting)

    def _live(self, after: Future[None] | None) -> None:
        if after is not None:  # of two engines at once, each would want the memory and the files of the other
            wait((after,))
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self.left.set_exception(error)
        else:
            self.left.set_result(None)

    async def _serve(self) -> None:
        await self._leaving.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._starting is not None and not _has_failed(self._starting):
            await (await self._starting).close()


class _Reading:
    """The events of one request, read on the engine's loop and told on that of the one who has asked.

    They are read by one task, from the first to the last. Told is what it reads, and in the end the task itself.
    """

    _task: asyncio.Task[None]

    def __init__(self, home: _Home, request: dict[str, Any]) -> None:
        self._home = home
        self._request = request
        self._here = asyncio.get_running_loop()
        self._told: asyncio.Queue[Batch | asyncio.Task[None]] = asyncio.Queue()
        home.loop.call_soon_threadsafe(self._begin)

    async def open(self) -> Events:
        """The events. What is refused is raised here."""
        events = self._tell_all()
        await anext(events)  # that it has begun
        return events

    def _begin(self) -> None:
        self._task = self._home.begin(self._read())
        self._task.add_done_callback(self._tell)

    def _tell(self, told: "Batch | asyncio.Task[None]") -> None:
        with suppress(RuntimeError):  # a loop that has ended has nobody who listens
            self._here.call_soon_threadsafe(self._told.put_nowait, told)

    async def _read(self) -> None:
        from antiphon.agent.transports.engine import LocalTransport

        engine = await self._home.find_engine()
        async with aclosing(await LocalTransport(engine).stream(self._request)) as events:
            self._tell(())
            async for batch in events:
                self._tell(batch)

    def _cancel(self) -> None:
        self._task.cancel()

    async def _tell_all(self) -> Events:
        ended = False
        try:
            while not isinstance(told := await self._told.get(), asyncio.Task):
                yield told
            ended = True
            if told.cancelled():
                raise Unavailable("The agent was closed while the model was at work.")
            told.result()
        finally:
            if not ended:
                await self._stop()

    async def _stop(self) -> None:
        """Stop the model, and wait until it has stopped."""
        with suppress(RuntimeError):  # the engine has gone, and has told of this task's end before
            self._home.loop.call_soon_threadsafe(self._cancel)
        while not isinstance(await self._told.get(), asyncio.Task):
            pass


def _has_failed(starting: "asyncio.Task[Engine]") -> bool:
    return starting.done() and starting.exception() is not None


async def _start() -> "Engine":
    # An engine takes longer to load than an agent that talks to a server should have to wait.
    from antiphon.config import environment, load
    from antiphon.engine.assembly import build_engine

    engine = build_engine(load(None, environment(), {}))
    await engine.start()
    return engine


class Agent(agent.Agent):
    __doc__ = f"""{agent.Agent.__doc__}
    Without a `base_url` or a `transport`, the model runs in this process, as the settings say.
    """

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        return InProcess() if base_url is None else super()._connect(base_url, api_key)
