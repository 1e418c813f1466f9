"""Tools of MCP servers, next to those in Python: `async with McpServer.stdio("server") as server: server.tools`."""

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
from antiphon.tools.mcp_connection import Connect, Connection, connect_http, connect_stdio, require_package
from antiphon.tools.schema import is_strict


class _Resource(Struct, rename="camel"):
    uri: str = ""
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None


class _Block(Struct, rename="camel"):
    """Any block of content. What it has depends on its type, and types are added from time to time."""

    type: str
    text: str = ""
    data: str = ""
    mime_type: str = ""
    resource: _Resource = field(default_factory=_Resource)


class _Result(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Any = None
    is_error: bool = False


def read_result(result: JsonObject) -> ToolResult:
    """The result of `tools/call`, as JSON has it."""
    read = msgspec.convert(result, _Result)
    parts = [_read_block(block) for block in read.content]
    structured = read.structured_content
    if structured is not None and not _is_told(structured, parts):
        parts.append(_say(structured))
    if any(part["type"] != "input_text" for part in parts):
        return ToolResult(parts, is_error=read.is_error)
    return ToolResult("\n".join(part["text"] for part in parts), is_error=read.is_error)


def _read_block(raw: JsonObject) -> JsonObject:
    block = msgspec.convert(raw, _Block)
    match block.type:
        case "text":
            return _text(block.text)
        case "image":
            return _image(block.mime_type, block.data)
        case "audio":
            return _say({"audio": block.mime_type, "base64_characters": len(block.data), "note": "cannot be shown"})
        case "resource":
            return _read_resource(block.resource)
        case _:
            return _say({name: value for name, value in raw.items() if name != "_meta"})


def _read_resource(resource: _Resource) -> JsonObject:
    if resource.text is not None:
        return _text(resource.text)
    kind, blob = resource.mime_type or "", resource.blob or ""
    if kind.startswith("image/"):
        return _image(kind, blob)
    return _say(
        {"resource": resource.uri, "mime_type": kind, "base64_characters": len(blob), "note": "cannot be shown"}
    )


def _is_told(structured: Any, parts: list[JsonObject]) -> bool:
    """Whether the texts say the same already: servers repeat structured content for those who do not know it.

    A value that is no object they say as it is, and have it under `result` in the structured content; a list as one
    text for each of its elements.
    """
    texts = [part["text"] for part in parts if part["type"] == "input_text"]
    said = [_parse(text) for text in texts]
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    values = [structured, structured["result"]] if wrapped else [structured]
    return any(value in said or value in texts or (bool(said) and value == said) for value in values)


def _parse(text: str) -> Any:
    try:
        return read_json(text)
    except msgspec.DecodeError:
        return text


def _say(value: Any) -> JsonObject:
    return _text(msgspec.json.encode(value).decode())


def _text(text: str) -> JsonObject:
    return {"type": "input_text", "text": text}


def _image(kind: str, data: str) -> JsonObject:
    return {"type": "input_image", "image_url": f"data:{kind};base64,{data}"}


if TYPE_CHECKING:
    from mcp.types import Tool as McpTool

logger = logging.getLogger(__name__)

_SECONDS = 300.0
_LONGEST_NAME = 64
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
_IDEMPOTENCY_KEY = "antiphon/idempotency-key"


class McpOptions(TypedDict, total=False):
    """What to make of a server's tools. Their names are those that the server uses.

    `prefix` is put before each name, so that two servers do not collide. `allow` are the tools to offer; all, if it is
    left out. `timeout` is in seconds, for every tool or by name; None is no limit, and left out it is 300.
    `needs_approval` is for all of them, or for those named.
    """

    prefix: str
    allow: Collection[str]
    timeout: float | Mapping[str, float] | None
    needs_approval: bool | Collection[str]


class McpServer:
    """A server, connected between entering and leaving it. A connection that is lost is opened once more when needed.

    `tools` are asked for once in a connection, and again when the server says that they have changed: an agent that is
    made from then on has the new ones.
    """

    def __init__(self, name: str, connect: Connect, options: McpOptions) -> None:
        self._name = name
        self._connect = connect
        self._options = options
        self._tools: list[Tool] = []
        self._connection: Connection | None = None
        self._closed = True
        self._opening = asyncio.Lock()
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
        """A program that is started, and talked to through its input and output. `env` adds to its environment."""
        require_package()
        return cls(f"'{command}'", connect_stdio(command, args, env, cwd), options)

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **options: Unpack[McpOptions]) -> "McpServer":
        """A server with streamable HTTP at this URL."""
        require_package()
        return cls("over HTTP", connect_http(url, headers), options)

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools)

    async def __aenter__(self) -> "McpServer":
        self._closed = False
        try:
            listed = await self._renew()
            self._check_names(listed)
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

    async def _renew(self) -> "list[McpTool]":
        """Connect, and ask for the tools."""
        if self._connection is not None:
            await self._connection.close()
        self._connection = Connection(self._name, self._connect, self._list_soon)
        await self._connection.open()
        return await self._list(self._connection)

    async def _list(self, connection: Connection) -> "list[McpTool]":
        listed = await connection.list_tools()
        allowed = self._options.get("allow")
        self._tools = self._name_apart([self._make(tool) for tool in listed if allowed is None or tool.name in allowed])
        return listed

    def _list_soon(self) -> None:
        listing = asyncio.get_running_loop().create_task(self._list_again())
        self._listings.add(listing)
        listing.add_done_callback(self._listings.discard)

    async def _list_again(self) -> None:
        try:
            if self._connection is not None:
                await self._list(self._connection)
        except Exception as error:
            logger.warning("the new tools of the MCP server %s cannot be had", self._name, exc_info=error)

    def _check_names(self, listed: "list[McpTool]") -> None:
        """What was set for a tool that is not there was meant for another."""
        there = {tool.name for tool in listed}
        for option in ("allow", "timeout", "needs_approval"):
            named = self._options.get(option)
            missing = sorted(set(named) - there) if isinstance(named, Collection) else []
            if missing:
                known = ", ".join(sorted(there)) or "none"
                raise ConfigError(
                    f"The MCP server {self._name} has no tool '{missing[0]}' ({option}). It has: {known}."
                )

    def _name_apart(self, tools: list[Tool]) -> list[Tool]:
        names = [tool.name for tool in tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"Two tools of the MCP server {self._name} would be called '{twice[0]}'.")
        return tools

    def _make(self, listed: "McpTool") -> Tool:
        # A model's server may refuse an object that does not say what is in it.
        parameters = {"type": "object", "properties": {}} | listed.input_schema
        timeout = self._options.get("timeout", _SECONDS)
        approval = self._options.get("needs_approval", False)
        return Tool(
            name=_UNUSUAL.sub("_", self._options.get("prefix", "") + listed.name)[:_LONGEST_NAME],
            description=listed.description or listed.title or listed.name,
            parameters=parameters,
            strict=is_strict(parameters),
            timeout=timeout.get(listed.name, _SECONDS) if isinstance(timeout, Mapping) else timeout,
            needs_approval=approval if isinstance(approval, bool) else listed.name in approval,
            invoke=functools.partial(self._invoke, listed.name),
        )

    async def _invoke(self, name: str, text: str, context: ToolContext) -> ToolResult:
        arguments: dict[str, Any] = read_json(text or "{}", dict[str, Any])
        try:
            return read_result(await self._call(name, arguments, context))
        except AntiphonError as error:
            return make_error_result(error.message)

    async def _call(self, name: str, arguments: dict[str, Any], context: ToolContext) -> dict[str, Any]:
        meta = {_IDEMPOTENCY_KEY: context.idempotency_key}
        connection = await self._connected()
        try:
            return await connection.call(name, arguments, meta=meta, report=context.report)
        except AntiphonError:
            if not connection.fate.expired:
                raise
        connection = await self._connected()
        return await connection.call(name, arguments, meta=meta, report=context.report)

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._closed or self._connection is None:
                raise Unavailable(f"The connection to the MCP server {self._name} is closed.")
            if self._connection.fate.lost:
                await self._renew()
            return self._connection
