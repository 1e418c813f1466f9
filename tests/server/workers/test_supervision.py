"""The supervisor with workers that are simulated by the test: failed starts, questions and reloads."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from antiphon.config.settings import Settings
from antiphon.server.running_servers import FOLDER, find_server
from antiphon.server.workers.messages import (
    Answers,
    Channel,
    Question,
    Reload,
    Reloaded,
    WorkerDied,
    WorkerReady,
    decode_for_worker,
)
from antiphon.server.workers.supervisor import QuestionRelay, Supervisor, WorkerProcess
from antiphon.server.workers.worker import WorkerServer
from support.live_server import TIMEOUT, make_settings


class SimulatedWorker:
    """The process of a worker, and its end of the channel. It is ready at once and ends at any signal."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.settings: list[Settings] = []
        self.answer_reload: Callable[[], Awaitable[None]] | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._channel = await Channel.open(self._connection)
        self._channel.send(WorkerReady(["scripted"], needs_key=False))
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while (frame := await self._channel.receive()) is not None:
            message = decode_for_worker(frame)
            if isinstance(message, Reload):
                self.settings.append(message.settings)
                if self.answer_reload is not None:
                    await self.answer_reload()
                self._channel.send(Reloaded())

    def send_signal(self, number: int) -> None:
        if self._ended.is_set():
            raise ProcessLookupError
        self._channel.close()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0


class Simulation:
    """Replaces the start of processes.

    By the number of the worker, `failures` are the errors of the next starts, and `before_start` are calls before each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers: dict[int, SimulatedWorker] = {}
        self.starts: list[tuple[int, int]] = []
        self.failures: dict[int, OSError] = {}
        self.before_start: dict[int, Callable[[], Awaitable[None]]] = {}
        self.started = asyncio.Condition()
        monkeypatch.setattr(WorkerProcess, "start", self._start)

    async def _start(self, number: int, settings: Settings, listener: socket.socket) -> WorkerProcess:
        if number in self.failures:
            raise self.failures.pop(number)
        if number in self.before_start:
            await self.before_start[number]()
        ours, theirs = socket.socketpair()
        worker = self.workers[number] = SimulatedWorker(theirs)
        await worker.start()
        async with self.started:
            self.starts.append((number, settings.queued))
            self.started.notify_all()
        return WorkerProcess(number, cast(Any, worker), await Channel.open(ours))


class SentMessages:
    """A channel that records the messages to a worker."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def make_workers(number: int) -> tuple[dict[int, WorkerProcess], list[SentMessages]]:
    """Return workers that only record their messages."""
    channels = [SentMessages() for _ in range(number)]
    workers = {
        number: WorkerProcess(number, cast(Any, None), cast(Any, channel)) for number, channel in enumerate(channels, 1)
    }
    return workers, channels


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    earlier = signal.getsignal(signal.SIGHUP)
    yield Simulation(monkeypatch)
    signal.signal(signal.SIGHUP, earlier)


async def run_supervisor(
    folder: Path, load: Callable[[], Settings], use: Callable[[Supervisor], Awaitable[None]]
) -> None:
    """Run a supervisor of two workers, call `use` once they are ready, and stop it."""
    ready = asyncio.Event()
    settings = replace(make_settings(data_dir=folder), workers=2, queued=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(settings, listener, on_ready=lambda _: ready.set(), load_settings=load)
        running = asyncio.create_task(supervisor._run())
        async with asyncio.timeout(TIMEOUT):
            await ready.wait()
            await use(supervisor)
            supervisor._stop(signal.SIGTERM)
            await running


async def test_worker_that_cannot_be_started_does_not_stop_the_start(
    simulation: Simulation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.failures[2] = OSError("no memory")

    async def use(_: Supervisor) -> None:
        async with simulation.started:
            await simulation.started.wait_for(lambda: len(simulation.starts) == 2)

    await run_supervisor(tmp_path, make_settings, use)
    assert "worker 2 could not be started: no memory; it is started again now" in caplog.text


async def test_worker_started_during_a_reload_gets_the_new_settings(simulation: Simulation, tmp_path: Path) -> None:
    async def use(supervisor: Supervisor) -> None:
        async def restart_other() -> None:
            """Let the other worker die and start again while the first one applies the settings."""
            simulation.workers[2].send_signal(signal.SIGKILL)
            async with simulation.started:
                await simulation.started.wait_for(lambda: len(simulation.starts) == 3)

        simulation.workers[1].answer_reload = restart_other
        changes = await supervisor._apply_settings(replace(supervisor._settings, queued=7))
        assert changes.changed == ["queued"]

    await run_supervisor(tmp_path, make_settings, use)
    assert simulation.starts == [(1, 1), (2, 1), (2, 1)]
    assert [settings.queued for settings in simulation.workers[2].settings] == [7]


async def test_server_can_be_reloaded_while_its_other_workers_start(simulation: Simulation, tmp_path: Path) -> None:
    loaded = asyncio.Event()

    def load() -> Settings:
        loaded.set()
        settings: Settings = make_settings(data_dir=tmp_path)
        return replace(settings, workers=2, queued=7)

    async def reload() -> None:
        if find_server(tmp_path / FOLDER, os.getpid()) is not None:
            os.kill(os.getpid(), signal.SIGHUP)
            await loaded.wait()

    async def use(_: Supervisor) -> None:
        async with simulation.started:
            await simulation.started.wait_for(lambda: len(simulation.starts) == 2)

    simulation.before_start[2] = reload
    await run_supervisor(tmp_path, load, use)
    assert simulation.starts == [(1, 1), (2, 1)]
    assert [settings.queued for settings in simulation.workers[1].settings] == [7]


async def test_question_is_not_sent_to_a_worker_that_starts() -> None:
    workers, channels = make_workers(3)
    relay = QuestionRelay(workers)
    relay.ask(workers[1], Question("retrieve", b"", 5))
    assert [channel.sent for channel in channels] == [[Answers(5, [])], [], []]
    workers[3].is_ready = True
    relay.ask(workers[1], Question("retrieve", b"", 6))
    assert [channel.sent[1:] for channel in channels[:2]] == [[], []]
    assert channels[2].sent == [Question("retrieve", b"", 2)]


async def test_deaths_are_reported_to_the_other_workers_and_to_those_that_start() -> None:
    workers, channels = make_workers(2)
    relay = QuestionRelay(workers, remembered_deaths=2)
    workers[1].is_ready = True
    for owner in ("a", "b", "c"):
        relay.announce_death(owner)
    relay.report_deaths(workers[2])
    deaths = [WorkerDied(owner) for owner in ("a", "b", "c")]
    assert [channel.sent for channel in channels] == [deaths, deaths[1:]]


def test_second_stop_signal_does_not_end_a_worker_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    server = WorkerServer.__new__(WorkerServer)
    server.should_exit = False
    for _ in range(2):
        server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, exits) == (True, [])
