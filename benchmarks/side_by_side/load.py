"""Load on the compared servers: rounds of requests, with CPU time and latencies."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.client import Answer, Client, InvalidAnswer, post
from benchmarks.side_by_side.models import CHAIN
from benchmarks.side_by_side.servers import Peer, ProcessTree
from benchmarks.side_by_side.works import Work, check, count_turns, make_body, make_direct_body
from benchmarks.websocket import WebSocket, connect, make_frame

# The time limit of a round. The slowest server needs a minute for 128 streams.
_SECONDS = 120.0
_WARM_UP = 4

Send = Callable[[bytes], "asyncio.Future[Answer]"]


class Sample(NamedTuple):
    """Results of a round: CPU seconds, answers a second, and the seconds of every answer."""

    cpu: float
    rate: float
    wholes: list[float]
    firsts: list[float]
    deltas: list[float]


class Target:
    """A running server under load. Without a peer it is the upstream itself."""

    def __init__(self, name: str, port: int, pid: int, peer: Peer | None) -> None:
        self.name = name
        self.process = ProcessTree(pid)
        self._port = port
        self._peer = peer
        self._client = Client(port)
        self._sockets: list[WebSocket] = []

    async def run_round(self, work: Work, count: int) -> Sample:
        """Send `count` requests, or as many chains. Raises InvalidAnswer if one answer is wrong."""
        before = self.process.cpu
        try:
            answers, seconds = await self._load(work, count)
        finally:
            # Servers close idle connections after a few seconds. After a failure they are in the middle of an answer.
            self.close()
        cpu = self.process.cpu - before
        if work.model != CHAIN and self._peer is not None:
            for answer in answers:
                check(work, answer)
        wholes = [answer.whole for answer in answers]
        return Sample(
            cpu=cpu / len(answers),
            rate=len(answers) / seconds,
            wholes=wholes,
            firsts=[answer.first for answer in answers],
            deltas=[answer.delta for answer in answers],
        )

    async def _load(self, work: Work, count: int) -> tuple[list[Answer], float]:
        """Return the answers, and the seconds from the first request to the last answer."""
        turns = iter(range(count))
        try:
            async with asyncio.timeout(_SECONDS):
                sends = await self._open(work)
                began = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._repeat(send, work, turns)) for send in sends]
        except TimeoutError:
            raise InvalidAnswer(f"no {count} answers in {_SECONDS:g} seconds") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer for task in tasks for answer in task.result()], time.perf_counter() - began

    async def _open(self, work: Work) -> list[Send]:
        if not work.websocket:
            return [connection.send for connection in await self._client.connect(work.concurrency)]
        self._sockets = [socket for socket in self._sockets if not socket.closed]
        while len(self._sockets) < work.concurrency:
            self._sockets.append(await connect(self._port, key=self._peer.key if self._peer else ""))
        return [socket.send for socket in self._sockets[: work.concurrency]]

    async def _repeat(self, send: Send, work: Work, turns: Iterator[int]) -> list[Answer]:
        if work.model == CHAIN:
            return [answer for _ in turns for answer in await self._run_chain(send, work)]
        request = self._make_request(work)
        return [await send(request) for _ in turns]

    async def _run_chain(self, send: Send, work: Work) -> list[Answer]:
        answers: list[Answer] = []
        previous = None
        for turn in range(1, count_turns(work) + 1):
            answers.append(await send(self._make_request(work, previous)))
            previous = check(work, answers[-1], turn=turn)
        return answers

    def _make_request(self, work: Work, previous: str | None = None) -> bytes:
        if self._peer is None:
            return post(make_direct_body(work), path="/v1/chat/completions")
        body = make_body(work, model_prefix=self._peer.model_prefix, previous=previous)
        return make_frame(body) if work.websocket else post(body, key=self._peer.key, path=self._peer.path)

    def close(self) -> None:
        """Close the connections. The next round opens new ones."""
        self._client.close()
        self._client = Client(self._port)
        for socket in self._sockets:
            socket.close()
        self._sockets = []


class Effort(NamedTuple):
    """Rounds for each work and server, the seconds of a round, and the seconds after which no further round begins."""

    rounds: int
    round_seconds: float
    budget: float


class Measured:
    """The rounds of one work on one server, or the reason why there are none."""

    def __init__(self, work: Work, target: Target) -> None:
        self._work = work
        self._target = target
        self._count = 0
        self._spent = 0.0
        self.samples: list[Sample] = []
        self.reason = ""

    async def run(self, effort: Effort) -> None:
        """Run a round, if there is time for one. The first call also finds out how many requests a round has."""
        if self.reason or (self.samples and self._spent >= effort.budget):
            return
        began = time.perf_counter()
        try:
            if not self._count:
                self._count = await self._find_count(effort)
                began = time.perf_counter()
            self.samples.append(await self._target.run_round(self._work, self._count))
        except (InvalidAnswer, OSError) as error:
            self.reason = f"failed: {str(error)[:300]}"
        self._spent += time.perf_counter() - began

    async def _find_count(self, effort: Effort) -> int:
        """Warm up with a few requests, and return how many fill a round."""
        chains = count_turns(self._work) > 1
        few = 1 if chains else min(_WARM_UP, self._work.concurrency)
        work = self._work._replace(concurrency=few)
        await self._target.run_round(work, few)
        rate = (await self._target.run_round(work, few)).rate / count_turns(work)
        return max(self._work.concurrency, round(effort.round_seconds * rate), 3)

    def summarize(self) -> dict[str, Any]:
        """Return the figures, for JSON. Rates and CPU times are medians of the rounds; latencies are of all answers."""
        if self.reason or not self.samples:
            return {"reason": self.reason or "not measured: the time was up"}
        work, samples = self._work, self.samples
        rate = statistics.median(sample.rate for sample in samples)
        cpu = statistics.median(sample.cpu for sample in samples)
        wholes = sorted(each for sample in samples for each in sample.wholes)
        figures = {
            "requests": len(wholes),
            "rounds": len(samples),
            "rate": rate,
            "cpu": cpu * 1e6,
            "p50": statistics.median(wholes) * 1e3,
            "p99": wholes[min(len(wholes) - 1, int(len(wholes) * 0.99))] * 1e3,
        }
        if work.tokens:
            figures |= {
                "event_rate": rate * work.tokens,
                "event_cpu": cpu / work.tokens * 1e6,
                "first": statistics.median(each for sample in samples for each in sample.firsts) * 1e3,
                "delta": statistics.median(each for sample in samples for each in sample.deltas) * 1e3,
            }
        return figures


@contextlib.contextmanager
def open_target(name: str, port: int, pid: int, peer: Peer | None) -> Iterator[Target]:
    target = Target(name, port, pid, peer)
    try:
        yield target
    finally:
        target.close()
