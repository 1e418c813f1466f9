"""Tools of a request, and the forms of `tool_choice`."""

import re
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import OpenUnion, Tagged, Unknown, Variant, Wire, always, union_field

_USER_INFO = re.compile(r"(?<=://)[^/?#]*@")

ToolName = Annotated[str, Meta(min_length=1)]
Caller = Literal["direct", "programmatic"]
Callers = Annotated[list[Caller], Meta(min_length=1)]

if TYPE_CHECKING:
    Tools: TypeAlias = "list[Tool | Unknown]"
else:
    Tools = union_field(lambda: TOOLS, many=True)


class FunctionTool(Tagged, tag="function"):
    name: ToolName
    description: str | None = always(None)
    parameters: JsonObject | None = always(None)
    strict: bool | None = always(None)
    allowed_callers: Callers | None = None
    async_: bool | None = msgspec.field(default=None, name="async")
    defer_loading: bool | None = None
    output_schema: JsonObject | None = None


class TextInput(Tagged, tag="text"):
    pass


class GrammarInput(Tagged, tag="grammar"):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomTool(Tagged, tag="custom"):
    name: ToolName
    description: str | None = None
    format: TextInput | GrammarInput | None = None
    allowed_callers: Callers | None = None
    async_: bool | None = msgspec.field(default=None, name="async")
    defer_loading: bool | None = None


class NamespaceTool(Tagged, tag="namespace"):
    name: ToolName
    description: str
    tools: Tools

    def __post_init__(self) -> None:
        self.tools = TOOLS.decode_list_field(self.tools, "tools", required=True)


class ToolSearchTool(Tagged, tag="tool_search"):
    description: str | None = None
    execution: Literal["server", "client"] | None = None
    parameters: Any = None


class RankingOptions(Wire):
    hybrid_search: JsonObject | None = None
    ranker: str | None = None
    score_threshold: float | None = None


class FileSearchTool(Tagged, tag="file_search"):
    vector_store_ids: list[str]
    filters: JsonObject | None = None
    max_num_results: int | None = None
    ranking_options: RankingOptions | None = None


class ComputerTool(Tagged, tag="computer"):
    pass


class ComputerUsePreviewTool(Tagged, tag="computer_use_preview"):
    display_height: int
    display_width: int
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"]


class UserLocation(Wire):
    type: Literal["approximate"] | None = None
    city: str | None = None
    country: str | None = None
    region: str | None = None
    timezone: str | None = None


class WebSearchFilters(Wire):
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None


class WebSearchTool(Tagged, tag="web_search"):
    external_web_access: bool | None = None
    filters: WebSearchFilters | None = None
    search_content_types: list[Literal["text", "image"]] | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: UserLocation | None = None


class WebSearchTool20250826(WebSearchTool, tag="web_search_2025_08_26"):
    pass


class WebSearchPreviewTool(WebSearchTool, tag="web_search_preview"):
    pass


class WebSearchPreviewTool20250311(WebSearchTool, tag="web_search_preview_2025_03_11"):
    pass


class McpToolFilter(Wire):
    read_only: bool | None = None
    tool_names: list[str] | None = None


class McpApprovalFilter(Wire):
    always: McpToolFilter | None = None
    never: McpToolFilter | None = None


class McpTool(Tagged, tag="mcp"):
    server_label: str
    allowed_callers: Callers | None = None
    allowed_tools: list[str] | McpToolFilter | None = None
    authorization: str | None = None
    connector_id: str | None = None
    defer_loading: bool | None = None
    headers: dict[str, str] | None = None
    require_approval: McpApprovalFilter | Literal["always", "never"] | None = None
    server_description: str | None = None
    server_url: str | None = None
    tunnel_id: str | None = None


class CodeInterpreterTool(Tagged, tag="code_interpreter"):
    container: str | JsonObject
    allowed_callers: Callers | None = None


class ProgrammaticToolCallingTool(Tagged, tag="programmatic_tool_calling"):
    pass


class ImageGenerationTool(Tagged, tag="image_generation"):
    action: Literal["generate", "edit", "auto"] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    complexity: Literal["low", "medium", "high"] | None = None
    frame_count: int | None = None
    frame_duration_ms: int | None = None
    input_fidelity: Literal["high", "low"] | None = None
    input_image_mask: JsonObject | None = None
    model: str | None = None
    moderation: Literal["auto", "low"] | None = None
    output_compression: int | None = None
    output_format: Literal["png", "webp", "jpeg", "gif", "svg"] | None = None
    partial_images: int | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto"] | None = None
    size: str | None = None
    svg: JsonObject | None = None


class LocalShellTool(Tagged, tag="local_shell"):
    pass


class ShellTool(Tagged, tag="shell"):
    allowed_callers: Callers | None = None
    environment: JsonObject | None = None


class ApplyPatchTool(Tagged, tag="apply_patch"):
    allowed_callers: Callers | None = None


Tool = (
    FunctionTool
    | CustomTool
    | NamespaceTool
    | ToolSearchTool
    | FileSearchTool
    | ComputerTool
    | ComputerUsePreviewTool
    | WebSearchTool
    | WebSearchTool20250826
    | WebSearchPreviewTool
    | WebSearchPreviewTool20250311
    | McpTool
    | CodeInterpreterTool
    | ProgrammaticToolCallingTool
    | ImageGenerationTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
)


class FunctionBody(Wire):
    """The `function` object of a Chat Completions tool. The Responses API has these fields in the tool itself."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NestedFunction(Wire):
    function: FunctionBody
    type: Literal["function", "tool"] | None = None


def _flatten_tool(nested: NestedFunction) -> FunctionTool:
    body = nested.function
    return FunctionTool(body.name, body.description, body.parameters, body.strict)


_SECRET_TYPES = frozenset({McpTool, CodeInterpreterTool, ShellTool, NamespaceTool})

TOOLS: OpenUnion[Tool] = OpenUnion(
    "Tool", get_args(Tool), variants={"function": Variant("function", NestedFunction, _flatten_tool)}
)


def has_credentials(tools: "list[Tool | Unknown]") -> bool:
    """Return True if a tool may contain credentials."""
    return not _SECRET_TYPES.isdisjoint(map(type, tools))


def hide_credentials(tool: Tool | Unknown) -> Tool | Unknown:
    """Return the tool without credentials, as it may be stored and shown."""
    match tool:
        case McpTool():
            url = None if tool.server_url is None else _USER_INFO.sub("", tool.server_url, count=1)
            return msgspec.structs.replace(tool, authorization=None, headers=None, server_url=url)
        case CodeInterpreterTool(container={"network_policy": {"domain_secrets": _}}):
            return msgspec.structs.replace(tool, container=_drop_domain_secrets(tool.container))
        case ShellTool(environment={"network_policy": {"domain_secrets": _}}):
            return msgspec.structs.replace(tool, environment=_drop_domain_secrets(tool.environment))
        case NamespaceTool() if has_credentials(tool.tools):
            shown = copy(tool)
            shown.tools = [hide_credentials(each) for each in tool.tools]
            return shown
    return tool


def _drop_domain_secrets(container: Any) -> JsonObject:
    """Return the options of a container without the secrets for its network."""
    policy = {name: value for name, value in container["network_policy"].items() if name != "domain_secrets"}
    return {**container, "network_policy": policy}


class FunctionChoice(Tagged, tag="function"):
    name: ToolName


class CustomChoice(Tagged, tag="custom"):
    name: ToolName


class McpChoice(Tagged, tag="mcp"):
    server_label: str
    name: str | None = None


class AllowedToolsChoice(Tagged, tag="allowed_tools"):
    """Only the listed tools may be called. The prompt still contains all tools, so the prompt cache stays valid."""

    tools: Annotated[list[JsonObject], Meta(min_length=1, max_length=128)]
    mode: Literal["none", "auto", "required"] = always("auto")


class FileSearchChoice(Tagged, tag="file_search"):
    pass


class WebSearchPreviewChoice(Tagged, tag="web_search_preview"):
    pass


class WebSearchPreview20250311Choice(Tagged, tag="web_search_preview_2025_03_11"):
    pass


class ComputerChoice(Tagged, tag="computer"):
    pass


class ComputerUseChoice(Tagged, tag="computer_use"):
    pass


class ComputerUsePreviewChoice(Tagged, tag="computer_use_preview"):
    pass


class ImageGenerationChoice(Tagged, tag="image_generation"):
    pass


class CodeInterpreterChoice(Tagged, tag="code_interpreter"):
    pass


class ProgrammaticToolCallingChoice(Tagged, tag="programmatic_tool_calling"):
    pass


class ApplyPatchChoice(Tagged, tag="apply_patch"):
    pass


class ShellChoice(Tagged, tag="shell"):
    pass


ToolChoice = (
    FunctionChoice
    | CustomChoice
    | McpChoice
    | AllowedToolsChoice
    | FileSearchChoice
    | WebSearchPreviewChoice
    | WebSearchPreview20250311Choice
    | ComputerChoice
    | ComputerUseChoice
    | ComputerUsePreviewChoice
    | ImageGenerationChoice
    | CodeInterpreterChoice
    | ProgrammaticToolCallingChoice
    | ApplyPatchChoice
    | ShellChoice
)


def _flatten_choice(nested: NestedFunction) -> FunctionChoice:
    return FunctionChoice(nested.function.name)


# Some older agents send `tool` instead of `function`.
CHOICES: OpenUnion[ToolChoice] = OpenUnion(
    "ToolChoice",
    get_args(ToolChoice),
    aliases={"tool": "function"},
    variants={"function": Variant("function", NestedFunction, _flatten_choice)},
)
CHOICE_WORDS = ("none", "auto", "required")


def decode_choice(value: Any, name: str) -> Any:
    """Decode a `tool_choice` field: one of the strings in `CHOICE_WORDS`, or one of the objects above."""
    choice = CHOICES.decode_text_or_field(value, name)
    if isinstance(choice, str) and choice not in CHOICE_WORDS:
        raise ValueError(f"Invalid enum value {choice!r} - at `$.{name}`")
    return choice
