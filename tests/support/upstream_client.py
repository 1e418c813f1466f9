"""An `UpstreamClient` under test with a scripted server. Its waits are recorded, not waited."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from antiphon.stream.deltas import Delta, Deltas, Finish, Text
from antiphon.stream.sse import SseMessage
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.options import UpstreamOptions
from support.idle_clock import count_idle_time
from support.upstream_server import Reply, UpstreamServer, serve

KEY = "sk-upstream-0123456789"


class WordReader:
    """A minimal API: each message is a word, `[DONE]` ends the answer, `-` is a keepalive."""

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


class Connection:
    """A client, its server, and the waits of the client."""

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
        """Return the batches of a whole answer."""
        return [batch async for batch in await self.begin()]


@asynccontextmanager
async def connect(*replies: Reply, **options: Any) -> AsyncIterator[Connection]:
    """Start a server with these replies and a client of it."""
    count_idle_time(asyncio.get_running_loop())
    async with serve(replies) as server:
        connection = Connection(server)
        connection.upstream = UpstreamClient(
            "there",
            UpstreamOptions(**{"base_url": server.url, "api_key": KEY} | options),
            headers={"Authorization": f"Bearer {KEY}"},
            sleep=connection.sleep,
            now=connection.now,
        )
        await connection.upstream.start()
        try:
            yield connection
        finally:
            await connection.upstream.close()
