"""One connection to an MCP server, from the handshake to its end. Here alone the `mcp` package is used.

What that package opens must be closed by the task that opened it; tools are called by many tasks, and one of them may
have to replace a connection that broke. So each connection is held by a task of its own.
"""

import asyncio
import importlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.errors import AntiphonError, ConfigError, UpstreamError, UpstreamTimeout
from antiphon.protocol.json_text import JsonObject

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import Tool as McpTool

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
_LIST_SECONDS = 30.0
_PARTING_SECONDS = 10.0
_SESSION_HEADER = "mcp-session-id"
_GONE = 404


class Fate:
    """What is known of a connection. `expired`: the server no longer knew us, and has done nothing of what we asked."""

    def __init__(self) -> None:
        self.lost = False
        self.expired = False

    def lose(self) -> None:
        self.lost = True

    def expire(self) -> None:
        self.lost = self.expired = True


Connect = Callable[[Fate], AbstractAsyncContextManager[Any]]


def require_package() -> None:
    try:
        importlib.import_module("mcp")
    except ImportError:
        raise ConfigError("Tools of MCP servers need the package 'mcp': install antiphon[mcp].") from None


def connect_stdio(command: str, args: Sequence[str], env: Mapping[str, str] | None, cwd: str | Path | None) -> Connect:
    from mcp import StdioServerParameters, stdio_client

    parameters = StdioServerParameters(command=command, args=list(args), env=dict(env) if env else None, cwd=cwd)

    @asynccontextmanager
    async def connect(fate: Fate) -> AsyncIterator[Any]:
        # The original stream: what stands in for it may have no file, which a process needs.
        async with stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr) as (reading, writing):
            yield _Watched(reading, fate), writing

    return connect


def connect_http(url: str, headers: Mapping[str, str] | None) -> Connect:
    @asynccontextmanager
    async def connect(fate: Fate) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def look(response: "httpx2.Response") -> None:
            if response.status_code == _GONE and _SESSION_HEADER in response.request.headers:
                fate.expire()

        # Tools have timeouts of their own, and a stream of changes may be silent for hours.
        timeout = httpx2.Timeout(_CONNECT_SECONDS, read=None)
        async with (
            httpx2.AsyncClient(
                headers=dict(headers or {}), timeout=timeout, event_hooks={"response": [look]}
            ) as client,
            streamable_http_client(url, http_client=client) as (reading, writing),
        ):
            yield _Watched(reading, fate), writing

    return connect


class _Watched:
    """A stream of messages that notes when it ends: the server is gone, even if nobody has asked it anything."""

    def __init__(self, stream: Any, fate: Fate) -> None:
        self._stream = stream
        self._fate = fate

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> "_Watched":
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except BaseException:
            self._fate.lose()
            raise

    async def __aenter__(self) -> "_Watched":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()


class Connection:
    """`on_change` is called when the server says that its tools are others now.

    `patience` is how many seconds the server has to tell all its tools, and at the most to let go in the end.
    """

    def __init__(
        self, name: str, connect: Connect, on_change: Callable[[], None], *, patience: float = _LIST_SECONDS
    ) -> None:
        self.fate = Fate()
        self._name = name
        self._connect = connect
        self._on_change = on_change
        self._patience = patience
        self._listens = False
        self._release = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Raises ConfigError if there is no such program, UpstreamError if the server does not answer as it should."""
        self._holder = asyncio.create_task(self._hold())
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.shield(self._client)
        except TimeoutError:
            await self.close()
            raise UpstreamTimeout(f"The MCP server {self._name} did not answer in {_CONNECT_SECONDS:g} s.") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._release.set()
        if self._holder is not None:
            if not self._client.done():
                self._holder.cancel()
            if not await self._await_holder(self._holder):
                # A server may leave our goodbye without an answer.
                self._holder.cancel()
                if not await self._await_holder(self._holder):
                    logger.warning("the MCP server %s does not let go of its connection", self._name)

    async def _await_holder(self, holder: "asyncio.Task[None]") -> bool:
        done, _ = await asyncio.wait([holder], timeout=min(self._patience, _PARTING_SECONDS))
        return bool(done)

    async def list_tools(self) -> "list[McpTool]":
        """All of them, however many pages they take. Raises UpstreamError if they cannot be had, or not in time."""
        limit = asyncio.timeout(self._patience)
        try:
            async with limit:
                return await self._read_pages(self._client.result())
        except Exception as error:
            if limit.expired():
                reason = f"did not list its tools in {self._patience:g} s"
                raise UpstreamTimeout(f"The MCP server {self._name} {reason}.") from None
            raise _as_ours(self._name, error) from error

    async def _read_pages(self, client: "Client") -> "list[McpTool]":
        tools: list[McpTool] = []
        cursors: set[str] = set()
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
            if cursor in cursors:
                raise UpstreamError(f"The MCP server {self._name} lists its tools in a circle.")
            cursors.add(cursor)

    async def call(self, name: str, arguments: JsonObject, *, meta: Any, report: Callable[[str], None]) -> JsonObject:
        """The result as JSON has it. Raises UpstreamError for whatever kept the server from giving one."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            report(message or (f"{progress:g}" if total is None else f"{progress:g} of {total:g}"))

        try:
            result = await self._client.result().call_tool(name, arguments, progress_callback=tell, meta=meta)
        except MCPError as error:
            broken = self.fate.lost or error.code == CONNECTION_CLOSED
            raise UpstreamError(self._explain("" if broken else error.message)) from error
        except Exception as error:
            raise UpstreamError(self._explain(f"{type(error).__name__}: {error}")) from error
        said: JsonObject = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        return said

    def _explain(self, reason: str) -> str:
        if not reason:
            return f"The connection to the MCP server {self._name} was lost. Whether the call took effect is not known."
        return f"The MCP server {self._name} gave no result: {reason}"

    async def _hold(self) -> None:
        from mcp import Client

        following: asyncio.Task[None] | None = None
        try:
            async with Client(self._connect(self.fate), message_handler=self._hear, cache=None) as client:
                following = asyncio.create_task(self._follow(client))
                self._client.set_result(client)
                await self._release.wait()
                following.cancel()
        except Exception as error:
            if self._client.done():
                logger.info("the connection to the MCP server %s broke", self._name, exc_info=error)
            else:
                self._client.set_exception(_as_ours(self._name, error))
        finally:
            self.fate.lose()
            if following is not None:
                following.cancel()

    async def _hear(self, message: Any) -> None:
        """Servers before 2026 tell of changes unasked."""
        if not self._listens and getattr(message, "method", "") == "notifications/tools/list_changed":
            self._on_change()

    async def _follow(self, client: "Client") -> None:
        """Later ones tell those who listen."""
        from mcp.client.subscriptions import ListenNotSupportedError

        tools = client.server_capabilities.tools
        if tools is None or not tools.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                self._listens = True
                async for _ in changes:
                    self._on_change()
        except ListenNotSupportedError:
            return
        except Exception as error:
            logger.info("the MCP server %s no longer tells of changes", self._name, exc_info=error)
            if self._listens:  # it was there, and may come back with other tools
                self.fate.lose()


def _as_ours(name: str, error: BaseException) -> AntiphonError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, AntiphonError):
        return error
    if isinstance(error, FileNotFoundError | PermissionError):
        return ConfigError(f"The MCP server {name} cannot be started: {error.strerror}.")
    return UpstreamError(f"The MCP server {name} cannot be used: {type(error).__name__}: {error}")
