"""The cost of telemetry: the CPU time of a server with metrics or traces against one without.

`prometheus` are the metrics of `/metrics`, `metrics` and `traces` are those of OpenTelemetry, `all` are these three.

The servers pass the same requests, those of guard.py, on to an upstream in this process. They get them in short turns,
because the speed of a machine changes within seconds. The export is counted too. The collector, which discards
everything, runs in this process.
"""

import asyncio
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import guard
from benchmarks.client import HOST, Client, InvalidAnswer, post
from benchmarks.report import Row, make_row
from benchmarks.servers import RunningServer, Server, make_antiphon_command, read_cpu, start_server
from benchmarks.workloads import Workload

SECTION = "CPU of the server with telemetry, ms a request"
KINDS = {
    "off": (),
    "prometheus": ("prometheus",),
    "metrics": ("metrics",),
    "traces": ("traces",),
    "all": ("prometheus", "metrics", "traces"),
}
# A batch has the spans of 256 requests. A round has several turns of it.
_REQUESTS = 256
_TURNS = 6
_WARM_UP_TURNS = 2
# Processes of the same server differ by 2 %.
_PROCESSES = 8
_CONCURRENCY = 8
_SECONDS = 120.0
_WORKLOADS = (guard.REQUEST, guard.STREAM)


async def measure(folder: Path, *, rounds: int, scale: float) -> tuple[list[Row], list[str]]:
    """Return the rows, or a note if the package is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        return [], ["telemetry: not measured, because the extras are not installed"]
    folder = folder / "telemetry"
    folder.mkdir()
    turns = max(1, round(_TURNS * scale))
    count = max(_CONCURRENCY, min(_REQUESTS, round(_REQUESTS * _TURNS * scale)))
    processes = _PROCESSES if scale >= 1 else 1
    async with contextlib.AsyncExitStack() as stack:
        collector = await stack.enter_async_context(start_collector())
        upstream_port = await stack.enter_async_context(guard.start_upstream())
        prepare = functools.partial(_prepare, upstream_port)
        servers = []
        for number, name in itertools.product(range(processes), KINDS):
            server = Server(name, "/readyz", prepare, environment=make_variables(name, collector))
            running = await stack.enter_async_context(start_server(server, folder / f"{name}-{number}"))
            servers.append((name, running))
        stack.enter_context(_separate([running.pid for _, running in servers]))
        return [await _measure_workload(servers, each, turns * rounds, count) for each in _WORKLOADS], []


def make_variables(kind: str, collector: str) -> dict[str, str]:
    """Return the environment variables that turn on this kind of telemetry."""
    variables = {
        "prometheus": {"ANTIPHON_METRICS": "1"},
        "metrics": {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": collector},
        "traces": {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector},
    }
    return {name: value for signal in KINDS[kind] for name, value in variables[signal].items()}


async def _measure_workload(
    servers: Sequence[tuple[str, RunningServer]], workload: Workload, turns: int, count: int
) -> Row:
    """Return the CPU time of each kind of server. Its samples are the means of its processes."""
    used = [0.0] * len(servers)
    for turn in range(-_WARM_UP_TURNS, turns):
        # The order is random: a server that follows a slower one would find other data in the caches.
        for number in random.sample(range(len(servers)), len(servers)):
            _, running = servers[number]
            cpu = await _measure_cpu(running.pid, running.port, workload, count)
            used[number] += cpu if turn >= 0 else 0.0
    samples = {
        name: [cpu / turns for cpu, (each, _) in zip(used, servers, strict=True) if each == name] for name in KINDS
    }
    return make_row(SECTION, workload.name, samples, remark=_describe_error(samples))


def _describe_error(samples: Mapping[str, Sequence[float]]) -> str:
    """Return the standard error of the ratios, which is mostly that of the processes."""
    if min(map(len, samples.values())) < 2:
        return ""
    errors = {
        name: statistics.stdev(found) / statistics.mean(found) / math.sqrt(len(found))
        for name, found in samples.items()
    }
    base = errors.pop("off")
    return f"ratios ± {max(math.hypot(base, error) for error in errors.values()):.1%}"


@contextlib.contextmanager
def _separate(pids: Iterable[int]) -> Iterator[None]:
    """Give the servers a processor of their own. Moves between processors would cost them their caches."""
    processors = os.sched_getaffinity(0)
    first, last = min(processors), max(processors)
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {last})
    os.sched_setaffinity(0, {first})
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)


async def _measure_cpu(pid: int, port: int, workload: Workload, count: int) -> float:
    """Return the CPU milliseconds of a server per request."""
    before = read_cpu(pid)
    with contextlib.closing(Client(port)) as client:
        request = post(workload.body, key=guard.KEY)
        answers = await client.load(request, count=count, concurrency=_CONCURRENCY, seconds=_SECONDS)
    if any(answer.status != 200 or b'"status":"completed"' not in answer.body for answer in answers):
        raise InvalidAnswer(f"a server with telemetry gave a wrong answer: {answers[0].body[:500]!r}")
    return (read_cpu(pid) - before) * 1000 / count


def _prepare(upstream_port: int, folder: Path, port: int) -> list[str]:
    models = json.dumps([workload.model for workload in _WORKLOADS])
    (folder / "antiphon.toml").write_text(
        f'data_dir = "{folder}"\n[[api_keys]]\nkey = "{guard.KEY}"\n'
        '[backends.chat]\nkind = "chat_completions"\n'
        f'base_url = "http://{HOST}:{upstream_port}/v1"\nmodels = {models}\n'
    )
    return make_antiphon_command(folder, port)


@contextlib.asynccontextmanager
async def start_collector() -> AsyncIterator[str]:
    """Yield the URL of a collector that accepts and discards everything."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
        with contextlib.suppress(*ended), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                (length,) = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")]
                await reader.readexactly(length)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(accept, HOST, 0)
    try:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}/v1/export"
    finally:
        server.close()
