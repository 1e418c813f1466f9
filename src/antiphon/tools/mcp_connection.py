"""One connection to an MCP server. Only this module and `mcp_http.py` use the `mcp` package.

That package requires the task that opens a connection to close it too. Tools are called by many tasks, and one of them
may have to replace a broken connection. So each connection is owned by a task of its own.
"""

import asyncio
import functools
import importlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from antiphon.errors import AntiphonError, ConfigError, UpstreamError, UpstreamTimeout
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.mcp_errors import describe_by_type, describe_error, get_cause, is_invalid_answer, one_line
from antiphon.tools.pydantic_types import describe_validation_error
from antiphon.upstream.addresses import OutboundRules
from antiphon.upstream.outbound import get_tls_context

if TYPE_CHECKING:
    import ssl

    import httpx2
    from mcp import Client
    from mcp.types import Tool as McpTool

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
LIST_SECONDS = 30.0
MAX_LIST_BYTES = 16 * 1024 * 1024
"""Maximum size of all pages of a list but the last. A server must not fill the memory with pages."""

IDEMPOTENCY_KEY = "antiphon/idempotency-key"
"""The field of `_meta` that is the same for every attempt at one call."""

_CLOSE_SECONDS = 10.0
_SESSION_HEADER = "mcp-session-id"
# Texts of the package for a lost connection. Its code, -32000, is also the one of many servers for errors of their own.
_LOST = ("Connection closed", "SSE stream ")
_NOT_FOUND = 404
_FIRST_ERROR = 400


class McpConnectionState:
    """The state of a connection.

    `expired`: the server does not know our session any more, so it has not executed the last request. An expired
    connection is also `lost`. `http_status` is the status of the last HTTP response, if that is an error. `failure` is
    the last error of the HTTP client.
    """

    def __init__(self) -> None:
        self.lost = False
        self.expired = False
        self.http_status: int | None = None
        self.failure: UpstreamError | None = None

    def mark_lost(self) -> None:
        self.lost = True

    def mark_expired(self) -> None:
        self.lost = self.expired = True

    def record_failure(self, failure: UpstreamError) -> None:
        self.failure = failure


class McpFailure(UpstreamError):
    """A request to an MCP server has no result. `reason` is the message without the name of the server.

    `number` is the JSON-RPC error code of the server, `http_status` the status of its HTTP response. They are None if
    there is none. `may_have_happened` is True if the connection was lost during a call.
    """

    def __init__(
        self,
        reason: str,
        *,
        message: str | None = None,
        number: int | None = None,
        http_status: int | None = None,
        may_have_happened: bool = False,
    ) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.number = number
        self.http_status = http_status
        self.may_have_happened = may_have_happened


Connect = Callable[[McpConnectionState], AbstractAsyncContextManager[Any]]
Handshake = Literal["auto", "legacy"]
"""`legacy`: that of the protocol before 2026-07-28. `auto`: the newest that the server knows."""


def require_package() -> None:
    """Raise ConfigError if the `mcp` package is not installed."""
    try:
        importlib.import_module("mcp")
    except ImportError:
        raise ConfigError("Tools of MCP servers need the package 'mcp': install antiphon[mcp].") from None


def load_package() -> None:
    """Import the `mcp` package, limit its log lines and load the certificates.

    This takes long: a server calls it in a thread.
    """
    for name in ("mcp.client.streamable_http", "mcp.client.sse", "mcp.client.subscriptions", "antiphon.tools.mcp_http"):
        importlib.import_module(name)
    for name in ("mcp.client.streamable_http", "mcp.client.sse"):
        logging.getLogger(name).addFilter(one_line)
    _get_tls_context()
    get_tls_context()


def connect_stdio(
    command: str | Path, args: Sequence[str | Path], env: Mapping[str, str] | None, cwd: str | Path | None
) -> Connect:
    from mcp import StdioServerParameters, stdio_client

    if isinstance(args, str):
        raise ConfigError(f"args: expected a list of texts, got a text. Use [{args!r}].")
    try:
        program, *rest = [str(each) if isinstance(each, Path) else each for each in (command, *args)]
        parameters = StdioServerParameters(command=program, args=rest, env=dict(env) if env else None, cwd=cwd)
    except ValueError as error:
        raise ConfigError(
            f"The MCP server '{command}' cannot be started: {describe_validation_error(error)}."
        ) from None

    @asynccontextmanager
    async def connect(state: McpConnectionState) -> AsyncIterator[Any]:
        # The original stream: a replacement of sys.stderr may have no file descriptor, and a process needs one.
        async with stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr) as (reading, writing):
            yield _WatchedStream(reading, state), writing

    return connect


def connect_http(url: str, headers: Mapping[str, str] | None, rules: OutboundRules | None = None) -> Connect:
    """Return a function that connects with the streamable HTTP transport. With `rules`, addresses are checked."""

    @asynccontextmanager
    async def connect(state: McpConnectionState) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import streamable_http_client

        async with (
            _make_http_client(headers, state, rules) as client,
            streamable_http_client(url, http_client=client) as (reading, writing),
        ):
            yield _WatchedStream(reading, state), writing

    return connect


@functools.cache
def _get_tls_context() -> "ssl.SSLContext":
    """Return the TLS settings of all connections. Loading the certificates takes longer than a connection."""
    import httpx2

    return httpx2.create_ssl_context()


def connect_sse(url: str, headers: Mapping[str, str] | None, rules: OutboundRules | None = None) -> Connect:
    """Return a function that connects with the older transport, HTTP with server-sent events."""

    @asynccontextmanager
    async def connect(state: McpConnectionState) -> AsyncIterator[Any]:
        from mcp.client.sse import sse_client

        def make_client(*_: Any, **__: Any) -> "httpx2.AsyncClient":
            return _make_http_client(headers, state, rules)

        async with sse_client(url, httpx_client_factory=make_client) as (reading, writing):
            yield _WatchedStream(reading, state), writing

    return connect


def _make_http_client(
    headers: Mapping[str, str] | None, state: McpConnectionState, rules: OutboundRules | None
) -> "httpx2.AsyncClient":
    import httpx2

    from antiphon.tools.mcp_http import McpHttpClient, OutboundTransport

    async def check_response(response: "httpx2.Response") -> None:
        state.http_status = response.status_code if response.status_code >= _FIRST_ERROR else None
        if response.status_code == _NOT_FOUND and _SESSION_HEADER in response.request.headers:
            state.mark_expired()

    transport: httpx2.AsyncBaseTransport | None = None
    if rules is not None:
        transport = OutboundTransport(rules, on_failure=state.record_failure)
    # No read timeout: tools have timeouts of their own, and a stream of changes may be idle for hours.
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)
    return McpHttpClient(
        headers=dict(headers or {}),
        timeout=timeout,
        event_hooks={"response": [check_response]},
        transport=transport,
        verify=_get_tls_context(),
    )


class _WatchedStream:
    """A stream of messages that marks the connection as lost when it ends, even if no request is in progress."""

    def __init__(self, stream: Any, state: McpConnectionState) -> None:
        self._stream = stream
        self._state = state

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> "_WatchedStream":
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except BaseException:
            self._state.mark_lost()
            raise

    async def __aenter__(self) -> "_WatchedStream":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()


class McpConnection:
    """A connection from the handshake to its end. `on_change` is called when the server reports changed tools.

    Without `on_change` there is no subscription to changes. `timeout` is in seconds. It limits the listing of all
    tools. Closing takes no longer than it either.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        on_change: Callable[[], None] | None,
        *,
        callbacks: Mapping[str, Any] | None = None,
        handshake: Handshake = "auto",
        timeout: float = LIST_SECONDS,
    ) -> None:
        self.state = McpConnectionState()
        self._name = name
        self._connect = connect
        self._on_change = on_change
        self._options = {**(callbacks or {}), "mode": handshake}
        self._timeout = timeout
        self._subscribed = False
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Connect. Raises ConfigError if the program cannot be started, UpstreamError if the handshake fails."""
        self._owner = asyncio.create_task(self._own_client())
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.shield(self._client)
        except TimeoutError:
            await self.close()
            raise UpstreamTimeout(f"The MCP server {self._name} did not answer in {CONNECT_SECONDS:g} s.") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closing.set()
        if self._owner is not None:
            if not self._client.done():
                self._owner.cancel()
            if not await self._wait_for(self._owner):
                # The server may not answer the request that ends the session.
                self._owner.cancel()
                if not await self._wait_for(self._owner):
                    logger.warning("the connection to the MCP server %s cannot be closed", self._name)

    async def _wait_for(self, owner: "asyncio.Task[None]") -> bool:
        done, _ = await asyncio.wait([owner], timeout=min(self._timeout, _CLOSE_SECONDS))
        return bool(done)

    async def list_tools(self) -> "list[McpTool]":
        """Return the tools of all pages. Raises UpstreamError if that fails, UpstreamTimeout if it takes too long."""
        return await self._list("tools")

    async def list_resources(self) -> list[JsonObject]:
        """Return the resources as JSON data. A server without resources has none."""
        return [] if self._capabilities.resources is None else _dump(await self._list("resources"))

    async def list_resource_templates(self) -> list[JsonObject]:
        """Return the resource templates as JSON data."""
        return [] if self._capabilities.resources is None else _dump(await self._list("resource_templates"))

    async def list_prompts(self) -> list[JsonObject]:
        """Return the prompts as JSON data. A server without prompts has none."""
        return [] if self._capabilities.prompts is None else _dump(await self._list("prompts"))

    async def read_resource(self, uri: str) -> JsonObject:
        """Return the result of `resources/read` as JSON data. Raises UpstreamError if the server returns none."""
        return await self._read(lambda client: client.read_resource(uri))

    async def get_prompt(self, name: str, arguments: Mapping[str, str]) -> JsonObject:
        """Return the result of `prompts/get` as JSON data. Raises UpstreamError if the server returns none."""
        return await self._read(lambda client: client.get_prompt(name, dict(arguments)))

    @property
    def _capabilities(self) -> Any:
        return self._client.result().server_capabilities

    async def _list(self, kind: str) -> list[Any]:
        limit = asyncio.timeout(self._timeout)
        name = kind.replace("_", " ")
        try:
            async with limit:
                return await self._read_pages(kind, name)
        except Exception as error:
            if limit.expired():
                reason = f"did not list its {name} in {self._timeout:g} s"
                raise UpstreamTimeout(f"The MCP server {self._name} {reason}.") from None
            raise self._map_error(error) from get_cause(error)

    async def _read_pages(self, kind: str, name: str) -> list[Any]:
        list_page = getattr(self._client.result(), f"list_{kind}")
        elements: list[Any] = []
        size = 0
        cursors: set[str] = set()
        cursor: str | None = None
        while True:
            page = await list_page(cursor=cursor)
            elements += getattr(page, kind)
            cursor = page.next_cursor
            if not cursor:
                return elements
            if cursor in cursors:
                raise UpstreamError(f"The MCP server {self._name} lists its {name} without end: a cursor repeats.")
            cursors.add(cursor)
            size += len(page.model_dump_json())
            if size > MAX_LIST_BYTES:
                raise UpstreamError(f"The MCP server {self._name} lists more than {MAX_LIST_BYTES} bytes of {name}.")

    async def _read(self, send: "Callable[[Client], Awaitable[Any]]") -> JsonObject:
        """Send a request that has no effect."""
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                result = await send(self._client.result())
        except Exception as error:
            if limit.expired():
                reason = f"did not answer in {self._timeout:g} s"
                raise UpstreamTimeout(f"The MCP server {self._name} {reason}.") from None
            cause = get_cause(error)
            text = describe_by_type(error) if cause is None else str(error)
            raise UpstreamError(f"The MCP server {self._name} returned no result: {text}") from cause
        return _dump([result])[0]

    async def call(self, name: str, arguments: JsonObject, *, meta: Any, report: Callable[[str], None]) -> JsonObject:
        """Call a tool and return the result as JSON data. Raises UpstreamError if the server returns none."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR

        async def report_progress(progress: float, total: float | None, message: str | None) -> None:
            report(message or (f"{progress:g}" if total is None else f"{progress:g} of {total:g}"))

        client = self._client.result()
        # The package lists all tools after the first call of one that was not listed on this connection.
        schemas = getattr(client.session, "_tool_output_schemas", None)
        if isinstance(schemas, dict):
            schemas.setdefault(name, None)
        try:
            result = await client.call_tool(name, arguments, progress_callback=report_progress, meta=meta)
        except MCPError as error:
            broken = self.state.lost or (error.code == CONNECTION_CLOSED and error.message.startswith(_LOST))
            reason = "" if broken else describe_by_type(error)
            raise self._make_failure(reason, None if broken else error.code) from error
        except Exception as error:
            is_invalid = is_invalid_answer(error)
            reason = "" if self.state.lost and not is_invalid else describe_by_type(error)
            raise self._make_failure(reason, INTERNAL_ERROR if is_invalid else None) from get_cause(error)
        return _dump([result])[0]

    def _make_failure(self, reason: str, number: int | None) -> McpFailure:
        """Return the error of a call. An empty reason means that the connection was lost."""
        failure, status = self.state.failure, self.state.http_status
        if reason:
            message = f"The MCP server {self._name} returned no result: {reason}"
            return McpFailure(
                reason, message=message, number=None if status is not None else number, http_status=status
            )
        unknown = "The call may or may not have taken effect."
        message = f"The connection to the MCP server {self._name} was lost. {unknown}"
        reason = f"The connection was lost. {unknown}" if failure is None else f"{failure.message} {unknown}"
        return McpFailure(reason, message=message, http_status=status, may_have_happened=True)

    def _map_error(self, error: BaseException) -> AntiphonError:
        """Return the error of the handshake or of a listing."""
        from mcp import MCPError

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, AntiphonError):
            return error
        if isinstance(error, FileNotFoundError | PermissionError):
            return ConfigError(f"The MCP server {self._name} cannot be started: {error.strerror}.")
        reason = describe_by_type(error) if self.state.failure is None else self.state.failure.message
        message = f"The MCP server {self._name} cannot be used: {describe_by_type(error)}"
        number = error.code if isinstance(error, MCPError) and self.state.http_status is None else None
        return McpFailure(reason, message=message, number=number, http_status=self.state.http_status)

    async def _own_client(self) -> None:
        """Open the client, wait until `close` is called, and close the client: the main of the owner task."""
        from mcp import Client

        subscription: asyncio.Task[None] | None = None
        try:
            async with Client(
                self._connect(self.state), message_handler=self._handle_message, cache=None, **self._options
            ) as client:
                subscription = asyncio.create_task(self._subscribe(client))
                self._client.set_result(client)
                await self._closing.wait()
                subscription.cancel()
        except Exception as error:
            if self._client.done():
                logger.info("the connection to the MCP server %s was lost: %s", self._name, describe_error(error))
            else:
                self._client.set_exception(self._map_error(error))
        finally:
            self.state.mark_lost()
            if subscription is not None:
                subscription.cancel()

    async def _handle_message(self, message: Any) -> None:
        """Handle the notification about changed tools, which servers before 2026 send without a subscription."""
        is_change = getattr(message, "method", "") == "notifications/tools/list_changed"
        if is_change and not self._subscribed and self._on_change is not None:
            self._on_change()

    async def _subscribe(self, client: "Client") -> None:
        """Subscribe to changes of the tools, as servers since 2026 require."""
        from mcp.client.subscriptions import ListenNotSupportedError

        tools = client.server_capabilities.tools
        if self._on_change is None or tools is None or not tools.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                self._subscribed = True
                async for _ in changes:
                    self._on_change()
        except ListenNotSupportedError:
            return
        except Exception as error:
            reason = describe_error(error)
            logger.info("the MCP server %s ended the subscription to its tools: %s", self._name, reason)
            if self._subscribed:  # the server may have stopped, and may come back with other tools
                self.state.mark_lost()


def _dump(models: Sequence[Any]) -> list[JsonObject]:
    """Return models of the `mcp` package as JSON data."""
    return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in models]
