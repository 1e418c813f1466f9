"""Tools of MCP servers: `async with McpServer.stdio("server") as server: server.tools`."""

import asyncio
import functools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
from msgspec import Struct, field

from antiphon.errors import AntiphonError, ConfigError, Unavailable
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.executor import make_error_result
from antiphon.tools.mcp_connection import Connect, McpConnection, connect_http, connect_stdio, require_package
from antiphon.tools.schema import is_strict

if TYPE_CHECKING:
    from mcp.types import Tool as McpTool

logger = logging.getLogger(__name__)

_DEFAULT_TIMEOUT = 300.0
_MAX_NAME_LENGTH = 64
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_IDEMPOTENCY_KEY = "antiphon/idempotency-key"


class McpOptions(TypedDict, total=False):
    """Options for the tools of a server. They use the tool names of the server.

    `prefix` is put before each name, so that the tools of two servers do not collide. `allow` are the tools to offer.
    Default: all. `timeout` is in seconds, for every tool or by name. None means no limit; the default is 300.
    `needs_approval` applies to all tools, or to the named ones.
    """

    prefix: str
    allow: Collection[str]
    timeout: float | Mapping[str, float] | None
    needs_approval: bool | Collection[str]


class McpServer:
    """An MCP server, connected inside `async with`. The next call opens a lost connection again, once.

    The list of `tools` is loaded once per connection, and again when the server reports a change. An agent has the
    tools that were listed when it was created.
    """

    def __init__(self, name: str, connect: Connect, options: McpOptions) -> None:
        self._name = name
        self._connect = connect
        self._options = options
        self._tools: list[Tool] = []
        self._connection: McpConnection | None = None
        self._closed = True
        self._connecting = asyncio.Lock()
        self._listings: set[asyncio.Task[None]] = set()

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Unpack[McpOptions],
    ) -> "McpServer":
        """Create a server that is started as a program, with the stdio transport. `env` adds to its environment."""
        require_package()
        return cls(f"'{command}'", connect_stdio(command, args, env, cwd), options)

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **options: Unpack[McpOptions]) -> "McpServer":
        """Create a server that is reached at a URL, with the streamable HTTP transport."""
        require_package()
        return cls("over HTTP", connect_http(url, headers), options)

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools)

    async def __aenter__(self) -> "McpServer":
        self._closed = False
        try:
            listed = await self._reconnect()
            self._check_option_names(listed)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._closed = True
        for listing in self._listings:
            listing.cancel()
        if self._connection is not None:
            await self._connection.close()

    async def _reconnect(self) -> "list[McpTool]":
        """Open a new connection and list the tools."""
        if self._connection is not None:
            await self._connection.close()
        self._connection = McpConnection(self._name, self._connect, self._schedule_listing)
        await self._connection.open()
        return await self._list_tools(self._connection)

    async def _list_tools(self, connection: McpConnection) -> "list[McpTool]":
        listed = await connection.list_tools()
        allowed = self._options.get("allow")
        tools = [self._make_tool(tool) for tool in listed if allowed is None or tool.name in allowed]
        self._require_unique_names(tools)
        self._tools = tools
        return listed

    def _schedule_listing(self) -> None:
        listing = asyncio.get_running_loop().create_task(self._refresh_tools())
        self._listings.add(listing)
        listing.add_done_callback(self._listings.discard)

    async def _refresh_tools(self) -> None:
        try:
            if self._connection is not None:
                await self._list_tools(self._connection)
        except Exception as error:
            logger.warning("listing the changed tools of the MCP server %s failed", self._name, exc_info=error)

    def _check_option_names(self, listed: "list[McpTool]") -> None:
        """Raise ConfigError if an option names an unknown tool."""
        available = {tool.name for tool in listed}
        for option in ("allow", "timeout", "needs_approval"):
            named = self._options.get(option)
            missing = sorted(set(named) - available) if isinstance(named, Collection) else []
            if missing:
                known = ", ".join(sorted(available)) or "none"
                raise ConfigError(
                    f"The MCP server {self._name} has no tool '{missing[0]}' ({option}). It has: {known}."
                )

    def _require_unique_names(self, tools: list[Tool]) -> None:
        names = [tool.name for tool in tools]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"Two tools of the MCP server {self._name} would be called '{repeated[0]}'.")

    def _make_tool(self, listed: "McpTool") -> Tool:
        # Some upstreams reject an object schema without `properties`.
        parameters = {"type": "object", "properties": {}} | listed.input_schema
        timeout = self._options.get("timeout", _DEFAULT_TIMEOUT)
        approval = self._options.get("needs_approval", False)
        hints = listed.annotations
        # A call that changes nothing, or nothing more than once, can be made again.
        is_repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        return Tool(
            name=_INVALID_CHARACTER.sub("_", self._options.get("prefix", "") + listed.name)[:_MAX_NAME_LENGTH],
            description=listed.description or listed.title or listed.name,
            parameters=parameters,
            strict=is_strict(parameters),
            timeout=timeout.get(listed.name, _DEFAULT_TIMEOUT) if isinstance(timeout, Mapping) else timeout,
            needs_approval=approval if isinstance(approval, bool) else listed.name in approval,
            invoke=functools.partial(self._invoke, listed.name),
            on_interrupt="retry" if is_repeatable else "ask",
            repeatable=is_repeatable,
        )

    async def _invoke(self, name: str, text: str, context: ToolContext) -> ToolResult:
        arguments: JsonObject = read_json(text or "{}", JsonObject)
        try:
            return translate_result(await self._call(name, arguments, context))
        except AntiphonError as error:
            return make_error_result(error.message)

    async def _call(self, name: str, arguments: JsonObject, context: ToolContext) -> JsonObject:
        meta = {_IDEMPOTENCY_KEY: context.idempotency_key}
        connection = await self._get_connection()
        try:
            return await connection.call(name, arguments, meta=meta, report=context.report)
        except AntiphonError:
            if not connection.state.expired:
                raise
        connection = await self._get_connection()
        return await connection.call(name, arguments, meta=meta, report=context.report)

    async def _get_connection(self) -> McpConnection:
        """Return the connection; if it is lost, open a new one."""
        async with self._connecting:
            if self._closed or self._connection is None:
                raise Unavailable(f"The connection to the MCP server {self._name} is closed.")
            if self._connection.state.lost:
                await self._reconnect()
            return self._connection


# Results


class _Resource(Struct, rename="camel"):
    uri: str = ""
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class _Block(Struct, rename="camel"):
    """A content block of any type. Its fields depend on the type; unknown types are passed on as JSON."""

    type: str
    text: str = ""
    data: str = ""
    mime_type: str = ""
    resource: _Resource = field(default_factory=_Resource)


class _CallResult(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Any = None
    is_error: bool = False


def translate_result(payload: JsonObject) -> ToolResult:
    """Translate the result of `tools/call` to content parts of the Responses API."""
    result = msgspec.convert(payload, _CallResult)
    parts = [_translate_block(block) for block in result.content]
    structured = result.structured_content
    if structured is not None and not _is_in_text(structured, parts):
        parts.append(_make_json_part(structured))
    if any(part["type"] != "input_text" for part in parts):
        return ToolResult(parts, is_error=result.is_error)
    return ToolResult("\n".join(part["text"] for part in parts), is_error=result.is_error)


def _translate_block(raw: JsonObject) -> JsonObject:
    block = msgspec.convert(raw, _Block)
    match block.type:
        case "text":
            return _make_text_part(block.text)
        case "image":
            return _make_image_part(block.mime_type, block.data)
        case "audio":
            return _make_json_part(
                {"audio": block.mime_type, "base64_characters": len(block.data), "note": "cannot be shown"}
            )
        case "resource":
            return _translate_resource(block.resource)
        case _:
            return _make_json_part({name: value for name, value in raw.items() if name != "_meta"})


def _translate_resource(resource: _Resource) -> JsonObject:
    if resource.text is not None:
        return _make_text_part(resource.text)
    mime_type, blob = resource.mime_type or "", resource.blob or ""
    if mime_type.startswith("image/"):
        return _make_image_part(mime_type, blob)
    return _make_json_part(
        {"resource": resource.uri, "mime_type": mime_type, "base64_characters": len(blob), "note": "cannot be shown"}
    )


def _is_in_text(structured: Any, parts: list[JsonObject]) -> bool:
    """Return True if the text parts contain the structured content. Servers repeat it for older clients.

    A value that is not an object is in the text as it is, and under `result` in the structured content. A list has one
    text part for each element.
    """
    texts = [part["text"] for part in parts if part["type"] == "input_text"]
    values = [_parse_text(text) for text in texts]
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    forms = [structured, structured["result"]] if wrapped else [structured]
    return any(form in values or form in texts or (bool(values) and form == values) for form in forms)


def _parse_text(text: str) -> Any:
    """Return the text decoded as JSON, or the text itself."""
    try:
        return read_json(text)
    except msgspec.DecodeError:
        return text


def _make_text_part(text: str) -> JsonObject:
    return {"type": "input_text", "text": text}


def _make_json_part(value: Any) -> JsonObject:
    return _make_text_part(msgspec.json.encode(value).decode())


def _make_image_part(mime_type: str, data: str) -> JsonObject:
    return {"type": "input_image", "image_url": f"data:{mime_type};base64,{data}"}
