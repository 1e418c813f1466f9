"""A Responses backend for tests, and the recorded streams that it can read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.backends.base import Turn
from antiphon.backends.responses.backend import ResponsesBackend, create
from antiphon.stream.deltas import Delta

RECORDINGS = Path(__file__).parents[1] / "wire" / "responses"


def read_recording(name: str) -> bytes:
    return (RECORDINGS / f"{name}.sse").read_bytes()


@asynccontextmanager
async def open_backend(url: str, *, name: str = "up", **options: Any) -> AsyncIterator[ResponsesBackend]:
    """Start a backend without retries for the upstream at this URL."""
    defaults = {"models": ["m"], "request_retries": 0, "stream_retries": 0}
    backend = create(name, {"base_url": url} | defaults | options, Path("unused"))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def collect_deltas(backend: ResponsesBackend, turn: Turn) -> list[Delta]:
    return [delta async for batch in await backend.stream(turn) for delta in batch]
