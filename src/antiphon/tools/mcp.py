"""Tools of MCP servers: `async with McpServer.stdio("server") as server: server.tools`."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import Struct, field

from antiphon.errors import AntiphonError, ConfigError, Unavailable
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import OnInterrupt, RunContext, Tool, ToolContext, ToolResult, make_name
from antiphon.tools.executor import make_error_result
from antiphon.tools.mcp_client import McpClient
from antiphon.tools.mcp_connection import (
    IDEMPOTENCY_KEY,
    Connect,
    McpConnection,
    connect_http,
    connect_stdio,
    require_package,
)
from antiphon.tools.mcp_errors import describe_error
from antiphon.tools.mcp_requests import OnElicitation, OnSampling, make_callbacks
from antiphon.tools.mcp_resources import (
    McpPrompt,
    McpResource,
    McpResourceTemplate,
    make_prompt_tools,
    make_resource_tools,
)
from antiphon.tools.schema import is_strict

if TYPE_CHECKING:
    from mcp.types import Tool as McpTool

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_TIMEOUT = 300.0


class McpOptions(TypedDict, total=False):
    """Options for the tools of a server. They use the tool names of the server."""

    prefix: str
    """A text before each name, so that the tools of two servers do not collide."""
    allow: Collection[str]
    """The tools to offer. Default: all."""
    timeout: float | Mapping[str, float] | None
    """Time limit of a call in seconds, for every tool or by name. None means no limit; the default is 300."""
    needs_approval: bool | Literal["destructive"] | Collection[str] | Callable[[str, Mapping[str, Any]], bool]
    """The calls that need approval.

    True: all. Names: those of these tools. "destructive": those of tools that the server does not declare harmless. Or
    a function of the name and the arguments decides.
    """
    retries: int | Mapping[str, int]
    """As in `Tool`, for every tool or by name. Default: 0."""
    on_interrupt: OnInterrupt | Mapping[str, OnInterrupt]
    """As in `Tool`, for every tool or by name. The default comes from the annotations of the server."""
    repeatable: bool | Collection[str]
    """As in `Tool`, for every tool or by name. The default comes from the annotations of the server."""
    resource_tools: bool
    """Add tools that list and read the resources of the server."""
    prompt_tools: bool
    """Add tools that list and read the prompts of the server."""
    on_elicitation: OnElicitation | None
    """Answers questions of the server to the user. Without it they are refused."""
    on_sampling: OnSampling | None
    """Answers requests of the server for an answer of a model. Without it they are refused."""


class McpServer:
    """An MCP server, connected inside `async with`. The next call opens a lost connection again, once.

    The list of `tools` is loaded once per connection, and again when the server reports a change. With
    `Agent(tools=[server])` each turn has the present list, with `Agent(tools=server.tools)` that of the beginning.
    """

    def __init__(self, name: str, connect: Connect, options: McpOptions) -> None:
        unknown = next((option for option in options if option not in McpOptions.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"got an unexpected keyword argument '{unknown}'")
        allowed: object = options.get("allow")
        if isinstance(allowed, str):
            # It would allow every tool whose name is a part of it.
            raise ConfigError(f"allow: expected a list of names, got a text. Use [{allowed!r}].")
        self._name = name
        self._connect = connect
        self._options = options
        self._tools: list[Tool] = []
        self._listed: list[McpTool] = []
        self._client: McpClient | None = None
        self._listings: set[asyncio.Task[None]] = set()

    @classmethod
    def stdio(
        cls,
        command: str | Path,
        args: Sequence[str | Path] = (),
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
        if not url.lower().startswith(("http://", "https://")):
            raise ConfigError(f"url: {url!r} must begin with http:// or https://.")
        return cls("over HTTP", connect_http(url, headers), options)

    @property
    def tools(self) -> list[Tool]:
        """The tools of the server. Raises Unavailable before the first connection: there would be none."""
        self._get_client()
        return list(self._tools)

    async def load_tools(self, context: RunContext[Any]) -> list[Tool]:
        """Return the present tools. An agent with this server among its tools loads them before every turn."""
        return self.tools

    async def __aenter__(self) -> "McpServer":
        self._client = McpClient(
            self._name,
            [self._connect],
            on_open=self._list_tools,
            on_change=self._schedule_listing,
            callbacks=make_callbacks(
                self._name, self._options.get("on_elicitation"), self._options.get("on_sampling"), _translate_message
            ),
        )
        try:
            await self._client.connect()
            self._check_option_names(self._listed)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        for listing in self._listings:
            listing.cancel()
        if self._client is not None:
            await self._client.close()

    async def _list_tools(self, connection: McpConnection) -> None:
        self._listed = await connection.list_tools()
        self._tools = self._make_tools(self._listed)

    def _make_tools(self, listed: "list[McpTool]") -> list[Tool]:
        allowed = self._options.get("allow")
        tools = [self._make_tool(tool) for tool in listed if allowed is None or tool.name in allowed]
        prefix = make_name(self._options.get("prefix", ""))
        if self._options.get("resource_tools", False):
            tools += make_resource_tools(self, prefix)
        if self._options.get("prompt_tools", False):
            tools += make_prompt_tools(self, prefix)
        self._require_unique_names(tools)
        return tools

    def _schedule_listing(self) -> None:
        listing = asyncio.get_running_loop().create_task(self._refresh_tools())
        self._listings.add(listing)
        listing.add_done_callback(self._listings.discard)

    async def _refresh_tools(self) -> None:
        try:
            if self._client is not None:
                await self._list_tools(await self._client.connect())
        except Exception as error:
            reason = describe_error(error)
            logger.warning("listing the changed tools of the MCP server %s failed: %s", self._name, reason)

    def _check_option_names(self, listed: "list[McpTool]") -> None:
        """Raise ConfigError if an option names an unknown tool."""
        available = {tool.name for tool in listed}
        for option in ("allow", "timeout", "needs_approval", "retries", "on_interrupt", "repeatable"):
            named = self._options.get(option)
            by_name = isinstance(named, Collection) and not isinstance(named, str)
            missing = sorted(set(named) - available) if by_name else []  # type: ignore[call-overload]
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
        hints = listed.annotations
        # A call that changes nothing, or that changes nothing more when repeated, can be made again.
        is_idempotent = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        repeatable = self._options.get("repeatable", is_idempotent)
        retries = self._find_option("retries", listed.name, 0)
        return Tool(
            name=make_name(self._options.get("prefix", "") + listed.name),
            description=listed.description or listed.title or listed.name,
            parameters=parameters,
            strict=is_strict(parameters),
            timeout=timeout.get(listed.name, _DEFAULT_TIMEOUT) if isinstance(timeout, Mapping) else timeout,
            retries=retries,
            needs_approval=self._choose_approval(listed),
            invoke=functools.partial(self._invoke, listed.name, raises=retries > 0),
            on_interrupt=self._find_option("on_interrupt", listed.name, "retry" if is_idempotent else "ask"),
            repeatable=repeatable if isinstance(repeatable, bool) else is_idempotent or listed.name in repeatable,
        )

    def _find_option(self, option: str, name: str, default: Any) -> Any:
        """Return the value of an option for the tool of this name."""
        value = self._options.get(option, default)
        return value.get(name, default) if isinstance(value, Mapping) else value

    def _choose_approval(self, listed: "McpTool") -> bool | Callable[[Mapping[str, Any]], bool]:
        approval = self._options.get("needs_approval", False)
        if isinstance(approval, bool):
            return approval
        if callable(approval):
            return functools.partial(approval, listed.name)
        if approval == "destructive":
            hints = listed.annotations
            # Without annotations, the protocol assumes that a tool is destructive.
            return hints is None or not (hints.read_only_hint or hints.destructive_hint is False)
        if isinstance(approval, str):
            raise ConfigError(f"needs_approval: {approval!r} is not 'destructive', a boolean, a list or a function.")
        return listed.name in approval

    async def _invoke(self, name: str, text: str, context: ToolContext, *, raises: bool) -> ToolResult:
        """Call a tool. With `raises`, the executor repeats a call that the server did not answer."""
        arguments: JsonObject = read_json(text or "{}", JsonObject)
        try:
            return translate_result(await self._call(name, arguments, context))
        except AntiphonError as error:
            if raises:
                raise
            is_unknown = getattr(error, "may_have_happened", False)
            return msgspec.structs.replace(make_error_result(error.message), may_have_happened=is_unknown)

    async def _call(self, name: str, arguments: JsonObject, context: ToolContext) -> JsonObject:
        meta = {IDEMPOTENCY_KEY: context.idempotency_key}
        return await self._get_client().call(name, arguments, meta=meta, report=context.report)

    # Resources and prompts

    async def list_resources(self) -> list[McpResource]:
        """Return the resources of the server."""
        return msgspec.convert(await self._read(McpConnection.list_resources), list[McpResource])

    async def list_resource_templates(self) -> list[McpResourceTemplate]:
        """Return the families of resources of the server."""
        return msgspec.convert(await self._read(McpConnection.list_resource_templates), list[McpResourceTemplate])

    async def read_resource(self, uri: str) -> list[JsonObject]:
        """Return the content of a resource as content parts of the Responses API. Raises UpstreamError."""
        payload = await self._read(lambda connection: connection.read_resource(uri))
        return [_translate_resource(msgspec.convert(each, _Resource)) for each in payload.get("contents", ())]

    async def list_prompts(self) -> list[McpPrompt]:
        """Return the prompts of the server."""
        return msgspec.convert(await self._read(McpConnection.list_prompts), list[McpPrompt])

    async def get_prompt(self, name: str, arguments: Mapping[str, str] | None = None) -> list[JsonObject]:
        """Return the messages of a prompt as input items: a task for an agent. Raises UpstreamError."""
        payload = await self._read(lambda connection: connection.get_prompt(name, arguments or {}))
        return [_translate_message(message) for message in payload.get("messages", ())]

    async def _read(self, read: Callable[[McpConnection], Awaitable[T]]) -> T:
        """Return the result of a request that has no effect. It is repeated once if the connection is lost."""
        connection = await self._get_client().connect()
        try:
            return await read(connection)
        except AntiphonError:
            if not connection.state.lost:
                raise
        return await read(await self._get_client().connect())

    def _get_client(self) -> McpClient:
        if self._client is None:
            raise Unavailable(f"The MCP server {self._name} is not connected: use it inside of 'async with'.")
        return self._client


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


def _translate_message(message: JsonObject) -> JsonObject:
    part = _translate_block(message.get("content") or {"type": "text"})
    if message.get("role") != "assistant":
        return {"role": "user", "content": [part]}
    # The messages of a model consist of text.
    text = part["text"] if part["type"] == "input_text" else msgspec.json.encode({"note": "cannot be shown"}).decode()
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


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
