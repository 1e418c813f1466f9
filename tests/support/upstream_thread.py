"""A scripted upstream in a thread, for tests that do not run in an event loop and for server processes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

TIMEOUT = 60


class ThreadedServer:
    """Runs the async context manager of a server in the event loop of a thread, until `close`.

    `support.upstream_server.serve(...)` and `support.raw_server.serve_raw(...)` make such context managers.
    """

    def __init__(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self.server: Any = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(context)), daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    @property
    def url(self) -> str:
        url: str = self.server.url
        return url

    async def _serve(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        async with context as self.server:
            self._ready.set()
            await self._end.wait()

    def wait_for(self, make: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await something of the server in its event loop: `wait_for(lambda server: server.until_requests(2))`."""

        async def wait() -> Any:
            return await make(self.server)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(TIMEOUT)

    def close(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
