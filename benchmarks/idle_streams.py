"""Memory of idle streams: the model has sent one delta and then nothing."""

import asyncio
import contextlib
import json
from pathlib import Path

from benchmarks.client import HOST, InvalidAnswer, post
from benchmarks.servers import Server, start_server
from benchmarks.workloads import IDLE, ONE_MESSAGE

_SECONDS = 30.0


async def measure(server: Server, folder: Path, *, streams: int) -> dict[str, tuple[float, float]]:
    """Return the megabytes without and with the streams, by kind. Each kind gets a new server."""
    found: dict[str, tuple[float, float]] = {}
    for kind, background in (("foreground", False), ("background", True)):
        async with start_server(server, folder / f"idle-{kind}") as running, contextlib.AsyncExitStack() as stack:
            # The first streams allocate the shared memory.
            await _open(running.port, 8, stack, background=background)
            before = running.megabytes
            await _open(running.port, streams, stack, background=background)
            found[kind] = before, running.megabytes
    return found


async def _open(port: int, count: int, stack: contextlib.AsyncExitStack, *, background: bool) -> None:
    """Open streams, read the first delta of each, and leave them open."""
    body = {"model": IDLE, "input": ONE_MESSAGE, "stream": True, "background": background}
    request = post(json.dumps(body).encode())
    async with asyncio.timeout(_SECONDS):
        await asyncio.gather(*(_open_one(port, request, stack) for _ in range(count)))


async def _open_one(port: int, request: bytes, stack: contextlib.AsyncExitStack) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    stack.push_async_callback(_disconnect, writer)
    writer.write(request)
    try:
        await reader.readuntil(b"output_text.delta")
    except asyncio.IncompleteReadError as error:
        raise InvalidAnswer(f"An idle stream ended: {error.partial[:2000]!r}") from None


async def _disconnect(writer: asyncio.StreamWriter) -> None:
    """Close the connection before the server is stopped."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
