"""The process that `guard.py` counts: our server, which also counts single steps of a request.

    python -m benchmarks.guard_worker KIND CONTROL_FD CONFIG PORT

When the server is up, it writes the counts of the steps as one JSON line to the control socket. Then it reads commands
from there: `start`, and `stop`, which is answered with the count.
"""

import asyncio
import gc
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn

from antiphon.backends.scripted.backend import create
from antiphon.cli.main import main as run_antiphon
from antiphon.engine import usage
from antiphon.engine.background import worker
from antiphon.engine.policy import Policy
from antiphon.engine.prompts import Prompts
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.pipeline import Pipeline
from antiphon.protocol import codec
from antiphon.protocol.events import Event
from antiphon.protocol.response import Response, Usage
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite import files
from antiphon.stream import sse
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Finish, Text, TokenUsage
from benchmarks.client import HOST
from benchmarks.counters import CallCounter, CallgrindCounter, Counter, PerfCounter
from benchmarks.workloads import ANSWERS, TEN_ITEMS, make_tools

BODY = json.dumps({"model": "scripted", "input": TEN_ITEMS, "tools": make_tools(3), "store": True}).encode()
# The interpreter specialises code that has run a few times.
WARM_UP = 20
REPEATS = 20
# After the start the store deletes expired data, in another thread. Its work would count for the first step.
SETTLE_SECONDS = 2.0

Step = Callable[[], Awaitable[object] | object]


def make_counter(kind: str, folder: Path) -> Counter:
    if kind == "perf":
        return PerfCounter()
    return CallgrindCounter(folder) if kind == "callgrind" else CallCounter()


def compose() -> list[list[Event | Unknown]]:
    """Compose an answer of 200 tokens, 10 a read."""
    response = Response(id="resp_1", created_at=0, model="scripted")
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_1", now=lambda: 0)
    batches: list[list[Event | Unknown]] = [[*composer.start()]]
    batches += [composer.compose([Text(piece) for piece in pieces]) for pieces in ANSWERS["long-batched"]]
    batches.append(
        composer.compose([TokenUsage(Usage(input_tokens=10, output_tokens=200, total_tokens=210)), Finish()])
    )
    return batches


async def count_steps(counter: Counter) -> dict[str, float]:
    """Return the counts of the steps of a request with 10 items and 3 tools, and of its answer of 200 tokens."""
    store = MemoryStore()
    backend = create("scripted", {"script": {"default": "hello"}}, Path())
    pipeline = Pipeline(
        {"scripted": backend}, store=store, prompts=Prompts(store), policy=Policy(), sealer=Sealer([bytes(32)])
    )
    await store.open()
    await pipeline.start()
    request = codec.decode_request(BODY).body
    batches = compose()
    steps: dict[str, Step] = {
        "decode": lambda: codec.decode_request(BODY),
        "prepare": lambda: pipeline.prepare(request, project="p"),
        "compose": compose,
        "encode": lambda: [sse.encode_batch(batch) for batch in batches],
    }
    counts = {name: await _count_step(counter, step) for name, step in steps.items()}
    await pipeline.close()
    await store.close()
    return counts


async def _count_step(counter: Counter, step: Step) -> float:
    async def repeat(times: int) -> None:
        for _ in range(times):
            result = step()
            if isinstance(result, Awaitable):
                await result

    await repeat(WARM_UP)
    counter.start()
    await repeat(REPEATS)
    return counter.stop() / REPEATS


async def run_commands(server: uvicorn.Server, counter: Counter, control: socket.socket) -> None:
    """Serve until the control socket is closed. Replaces uvicorn's main loop, which wakes ten times a second."""
    reader, writer = await asyncio.open_connection(sock=control)
    await asyncio.sleep(SETTLE_SECONDS)
    writer.write(json.dumps(await count_steps(counter)).encode() + b"\n")
    while command := await reader.readline():
        if command == b"start\n":
            counter.start()
            writer.write(b"started\n")
        else:
            writer.write(b"%d\n" % counter.stop())
    server.should_exit = True


def main(kind: str, control_file: str, config: str, port: str) -> int:
    counter = make_counter(kind, Path(config).parent)
    gc.disable()
    # These work on a clock. At the speed of a counted process they would run with every request.
    files.CHECK_SECONDS = 3600
    worker.CHECK_SECONDS = usage.FLUSH_SECONDS = 3600.0
    control = socket.socket(fileno=int(control_file))
    uvicorn.Server.main_loop = lambda server: run_commands(server, counter, control)  # type: ignore[method-assign]
    return run_antiphon(["serve", "--config", config, "--host", HOST, "--port", port])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
