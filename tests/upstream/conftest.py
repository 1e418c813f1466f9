"""An upstream under test, in front of a scripted server, whose waits are noted and not waited."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.stream.deltas import Delta, Deltas, Finish, Text
from antiphon.stream.sse import SseMessage
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.options import UpstreamOptions
from support.idle_clock import count_idle_time
from support.upstream_server import Reply, UpstreamServer, serve

KEY = "sk-upstream-0123456789"


class WordReader:
    """A little dialect: every message is a word; `[DONE]` ends the answer, `-` says nothing."""

    is_complete = False

    def __init__(self) -> None:
        self.finished = False

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data == b"[DONE]":
            self.finished = True
            return [Finish()]
        return [] if message.data == b"-" else [Text(message.data.decode())]

    def end(self) -> Sequence[Delta]:
        return ()


class Line:
    """An upstream, the server behind it, and what the upstream waited for."""

    def __init__(self, server: UpstreamServer) -> None:
        self.server = server
        self.waits: list[float] = []
        self.time = 1000.0
        self.upstream: UpstreamClient

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def now(self) -> float:
        return self.time

    async def begin(self, path: str = "/chat", body: bytes = b"{}", **headers: str) -> Deltas:
        return await self.upstream.stream(path, body, WordReader, headers=headers)

    async def ask(self) -> list[Sequence[Delta]]:
        """A whole answer, batch by batch."""
        return [batch async for batch in await self.begin()]


@pytest.fixture
def connect() -> Callable[..., Any]:
    @asynccontextmanager
    async def connect(*replies: Reply, **options: Any) -> AsyncIterator[Line]:
        count_idle_time(asyncio.get_running_loop())
        async with serve(replies) as server:
            line = Line(server)
            line.upstream = UpstreamClient(
                "there",
                UpstreamOptions(**{"base_url": server.url, "api_key": KEY} | options),
                headers={"Authorization": f"Bearer {KEY}"},
                sleep=line.sleep,
                now=line.now,
            )
            await line.upstream.start()
            try:
                yield line
            finally:
                await line.upstream.close()

    return connect
