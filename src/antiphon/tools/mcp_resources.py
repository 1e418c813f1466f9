"""Resources and prompts of MCP servers, and the tools by which a model can read them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from antiphon.errors import AntiphonError
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.tools.base import Tool, ToolContext, ToolResult
from antiphon.tools.executor import make_error_result

_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
_URI_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"uri": {"type": "string", "description": "The URI of the resource."}},
    "required": ["uri"],
    "additionalProperties": False,
}
_PROMPT_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The name of the prompt."},
        "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


class McpResource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A resource of an MCP server. `size` is in bytes."""

    name: str
    uri: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None


class McpResourceTemplate(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A family of resources of an MCP server. Its URI has parameters, such as `file:///{path}`."""

    name: str
    uri_template: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None


class McpPromptArgument(Struct, frozen=True, omit_defaults=True):
    """A parameter of a prompt."""

    name: str
    description: str | None = None
    required: bool = False


class McpPrompt(Struct, frozen=True, omit_defaults=True):
    """A prompt of an MCP server: messages, which may have parameters."""

    name: str
    title: str | None = None
    description: str | None = None
    arguments: tuple[McpPromptArgument, ...] = ()


class ReadableServer(Protocol):
    """The part of `McpServer` that the tools for resources and prompts use."""

    async def list_resources(self) -> list[McpResource]: ...

    async def list_resource_templates(self) -> list[McpResourceTemplate]: ...

    async def read_resource(self, uri: str) -> list[JsonObject]: ...

    async def list_prompts(self) -> list[McpPrompt]: ...

    async def get_prompt(self, name: str, arguments: Mapping[str, str] | None = None) -> list[JsonObject]: ...


class _ReadArguments(Struct):
    uri: str


class _PromptArguments(Struct):
    name: str
    arguments: dict[str, str] | None = None


def make_resource_tools(server: ReadableServer, prefix: str) -> list[Tool]:
    """Return the tools that list and read the resources of a server."""

    async def list_resources(_: str, __: ToolContext) -> ToolResult:
        listed = {"resources": await server.list_resources(), "templates": await server.list_resource_templates()}
        return ToolResult(msgspec.json.encode(listed).decode())

    async def read_resource(text: str, _: ToolContext) -> ToolResult:
        return ToolResult(await server.read_resource(read_json(text or "{}", _ReadArguments).uri))

    return [
        _make_reader(f"{prefix}list_resources", "List the resources of the server.", _NO_PARAMETERS, list_resources),
        _make_reader(f"{prefix}read_resource", "Read a resource of the server.", _URI_PARAMETERS, read_resource),
    ]


def make_prompt_tools(server: ReadableServer, prefix: str) -> list[Tool]:
    """Return the tools that list and read the prompts of a server."""

    async def list_prompts(_: str, __: ToolContext) -> ToolResult:
        return ToolResult(msgspec.json.encode(await server.list_prompts()).decode())

    async def get_prompt(text: str, _: ToolContext) -> ToolResult:
        given: _PromptArguments = read_json(text or "{}", _PromptArguments)
        return ToolResult(msgspec.json.encode(await server.get_prompt(given.name, given.arguments)).decode())

    return [
        _make_reader(f"{prefix}list_prompts", "List the prompts of the server.", _NO_PARAMETERS, list_prompts),
        _make_reader(f"{prefix}get_prompt", "Get the messages of a prompt.", _PROMPT_PARAMETERS, get_prompt),
    ]


def _make_reader(
    name: str, description: str, parameters: JsonObject, read: Callable[[str, ToolContext], Awaitable[ToolResult]]
) -> Tool:
    async def invoke(text: str, context: ToolContext) -> ToolResult:
        try:
            return await read(text, context)
        except AntiphonError as error:
            return make_error_result(error.message)

    return Tool(
        name=name,
        description=description,
        parameters=parameters,
        strict="required" in parameters and set(parameters["required"]) == set(parameters["properties"]),
        invoke=invoke,
        on_interrupt="retry",
        repeatable=True,
    )
