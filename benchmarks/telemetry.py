"""The cost of OpenTelemetry: the CPU time of a server with metrics and with traces against one without.

The servers get the same requests in turns. Their answers are those of a script, so a request is as short as it can be.
The export is counted too. The collector, which discards everything, runs in this process.
"""

import asyncio
import contextlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.client import HOST, Client, InvalidAnswer, post
from benchmarks.report import Row, make_row
from benchmarks.servers import Server, make_antiphon_command, read_cpu, start_server

SECTION = "CPU of the server with OpenTelemetry, ms a request"
VARIABLES = {
    "off": (),
    "metrics": ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",),
    "traces": ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",),
    "both": ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
}
# A batch has the spans of 256 requests.
_REQUESTS = 768
_CONCURRENCY = 8
_SECONDS = 120.0
_SCRIPT = {"models": ["short"], "default": "The evening train leaves from the usual platform."}
_WORKLOADS = {"request": {"model": "short", "input": "Hi"}, "stream": {"model": "short", "input": "Hi", "stream": True}}


async def measure(folder: Path, *, rounds: int, scale: float) -> tuple[list[Row], list[str]]:
    """Return the rows, or a note if the package is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        return [], ["telemetry: not measured, because the extras are not installed"]
    folder = folder / "telemetry"
    folder.mkdir()
    count = max(_CONCURRENCY, round(_REQUESTS * scale))
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        collector = await stack.enter_async_context(start_collector())
        servers = {}
        for name, variables in VARIABLES.items():
            server = Server(name, "/readyz", _prepare, environment=dict.fromkeys(variables, collector))
            servers[name] = await stack.enter_async_context(start_server(server, folder / name))
        for number in range(rounds + 1):
            for workload, body in _WORKLOADS.items():
                for name, running in servers.items():
                    cpu = await _measure_cpu(running.pid, running.port, body, count if number else _CONCURRENCY * 8)
                    if number:  # the first round warms up
                        found[workload][name].append(cpu)
    return [make_row(SECTION, workload, samples) for workload, samples in found.items()], []


async def _measure_cpu(pid: int, port: int, body: dict[str, object], count: int) -> float:
    """Return the CPU milliseconds of a server per request."""
    before = read_cpu(pid)
    with contextlib.closing(Client(port)) as client:
        request = post(json.dumps(body).encode())
        answers = await client.load(request, count=count, concurrency=_CONCURRENCY, seconds=_SECONDS)
    if any(answer.status != 200 or b'"status":"completed"' not in answer.body for answer in answers):
        raise InvalidAnswer(f"a server with telemetry gave a wrong answer: {answers[0].body[:500]!r}")
    return (read_cpu(pid) - before) * 1000 / count


def _prepare(folder: Path, port: int) -> list[str]:
    (folder / "script.json").write_text(json.dumps(_SCRIPT))
    (folder / "antiphon.toml").write_text(
        f'data_dir = "{folder}"\nlog_level = "warning"\n'
        f'[backends.scripted]\nkind = "scripted"\nscript = "{folder}/script.json"\n'
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
