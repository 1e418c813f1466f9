"""Items of hosted tools: search, computer, shell, patches, code, images, MCP, programs.

`caller` and a few inner objects differ between API versions and are not interpreted: they are plain JSON objects.
OpenAI accepts calls without a `status` or an `id` as input, and clients send them so: Codex omits the ids of searches
and of local shell calls. Items that the server creates have an empty id until they get their own.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import field

from antiphon.protocol.content import ComputerScreenshot, PromptCacheBreakpoint
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import TOOLS, Tools
from antiphon.protocol.unions import Tagged, Wire, always

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
HostedStatus: TypeAlias = Literal[
    "in_progress", "completed", "incomplete", "searching", "interpreting", "generating", "calling", "failed"
]


class FileSearchResult(Wire):
    attributes: JsonObject | None = None
    file_id: str | None = None
    filename: str | None = None
    score: float | None = None
    text: str | None = None


class FileSearchCall(Tagged, tag="file_search_call"):
    queries: list[str]
    id: str = always("")
    status: HostedStatus | None = None
    results: list[FileSearchResult] | None = always(None)


class WebSearchCall(Tagged, tag="web_search_call"):
    id: str = always("")
    action: JsonObject | None = None
    status: HostedStatus | None = None
    results: list[JsonObject] | None = None


class SafetyCheck(Wire):
    id: str
    code: str | None = None
    message: str | None = None


class ComputerCall(Tagged, tag="computer_call"):
    call_id: str
    pending_safety_checks: list[SafetyCheck]
    id: str = always("")
    status: ItemStatus | None = None
    action: JsonObject | None = None
    actions: list[JsonObject] | None = None


class _Screenshot(Wire):
    """A screenshot as clients send it. OpenAI's first guide to computer use had the type `input_image`."""

    type: Literal["computer_screenshot", "input_image"] = "computer_screenshot"
    file_id: str | None = None
    image_url: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


if TYPE_CHECKING:
    Screenshot: TypeAlias = ComputerScreenshot
else:
    Screenshot = _Screenshot


class ComputerCallOutput(Tagged, tag="computer_call_output"):
    call_id: str
    output: Screenshot
    id: str | None = None
    acknowledged_safety_checks: list[SafetyCheck] | None = None
    status: HostedStatus | None = None
    created_by: str | None = None

    def __post_init__(self) -> None:
        sent: Any = self.output
        if isinstance(sent, _Screenshot):
            self.output = ComputerScreenshot(sent.file_id, sent.image_url, sent.detail, sent.prompt_cache_breakpoint)


class CodeInterpreterCall(Tagged, tag="code_interpreter_call"):
    container_id: str
    id: str = always("")
    status: HostedStatus | None = None
    code: str | None = always(None)
    outputs: list[JsonObject] | None = always(None)


class ImageGenerationCall(Tagged, tag="image_generation_call"):
    id: str = always("")
    status: HostedStatus | None = None
    result: str | None = always(None)
    action: str | None = None
    background: str | None = None
    error: JsonObject | None = None
    output_format: str | None = None
    quality: str | None = None
    revised_prompt: str | None = None
    size: str | None = None
    svg_usage: JsonObject | None = None


class LocalShellAction(Wire):
    command: list[str]
    env: dict[str, str] | None = always(None)  # never None afterwards
    type: Literal["exec"] = always("exec")
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None

    def __post_init__(self) -> None:
        self.env = self.env or {}


class LocalShellCall(Tagged, tag="local_shell_call"):
    call_id: str
    action: LocalShellAction
    id: str = always("")
    status: ItemStatus | None = None


class LocalShellCallOutput(Tagged, tag="local_shell_call_output"):
    """The output of a local shell call.

    In the API, `id` is the id of the call. An output with an id of its own has a `call_id`, like other outputs. Stored
    outputs always do: item ids are unique, but several calls may have the same id.
    """

    id: str
    output: str
    status: ItemStatus | None = None
    given_call_id: str | None = field(default=None, name="call_id")

    @property
    def call_id(self) -> str:
        return self.given_call_id or self.id


class AgentsSdkShellOutput(Wire):
    """A local shell output as the OpenAI Agents SDK sends it: with a `call_id` and without an `id`."""

    call_id: str
    output: str
    type: str
    id: None = None
    status: ItemStatus | None = None


def convert_agents_sdk_output(output: AgentsSdkShellOutput) -> LocalShellCallOutput:
    return LocalShellCallOutput("", output.output, output.status, output.call_id)


class ShellAction(Wire):
    commands: list[str]
    max_output_length: int | None = None
    timeout_ms: int | None = None


class ShellCall(Tagged, tag="shell_call"):
    call_id: str
    action: ShellAction
    id: str | None = None
    caller: JsonObject | None = None
    environment: JsonObject | None = None
    status: ItemStatus | None = None
    created_by: str | None = None


class ShellOutput(Wire):
    stdout: str
    stderr: str
    outcome: JsonObject
    created_by: str | None = None


class ShellCallOutput(Tagged, tag="shell_call_output"):
    call_id: str
    output: list[ShellOutput]
    id: str | None = None
    caller: JsonObject | None = None
    max_output_length: int | None = None
    status: ItemStatus | None = None
    created_by: str | None = None


class ApplyPatchCall(Tagged, tag="apply_patch_call"):
    call_id: str
    operation: JsonObject
    status: ItemStatus | None = None
    id: str | None = None
    caller: JsonObject | None = None
    created_by: str | None = None


class ApplyPatchCallOutput(Tagged, tag="apply_patch_call_output"):
    call_id: str
    status: HostedStatus
    id: str | None = None
    caller: JsonObject | None = None
    output: str | None = None
    created_by: str | None = None


class McpToolInfo(Wire):
    name: str
    input_schema: Any
    annotations: Any = None
    description: str | None = None


class McpListTools(Tagged, tag="mcp_list_tools"):
    server_label: str
    tools: list[McpToolInfo]
    id: str = always("")
    error: Any = None


class McpApprovalRequest(Tagged, tag="mcp_approval_request"):
    id: str
    arguments: str
    name: str
    server_label: str


class McpApprovalResponse(Tagged, tag="mcp_approval_response"):
    approval_request_id: str
    approve: bool
    id: str | None = None
    reason: str | None = None


class McpCall(Tagged, tag="mcp_call"):
    arguments: str
    name: str
    server_label: str
    id: str = always("")
    approval_request_id: str | None = None
    error: Any = always(None)
    output: str | None = always(None)
    status: HostedStatus | None = None


class ToolSearchCall(Tagged, tag="tool_search_call"):
    arguments: Any
    id: str | None = None
    call_id: str | None = always(None)
    execution: Literal["server", "client"] | None = None
    status: ItemStatus | None = None
    created_by: str | None = None


class ToolSearchOutput(Tagged, tag="tool_search_output"):
    tools: Tools
    id: str | None = None
    call_id: str | None = always(None)
    execution: Literal["server", "client"] | None = None
    status: ItemStatus | None = None
    created_by: str | None = None

    def __post_init__(self) -> None:
        self.tools = TOOLS.decode_list_field(self.tools, "tools", required=True)


class AdditionalTools(Tagged, tag="additional_tools"):
    role: Literal["unknown", "user", "assistant", "system", "critic", "discriminator", "developer", "tool"]
    tools: Tools
    id: str | None = None

    def __post_init__(self) -> None:
        self.tools = TOOLS.decode_list_field(self.tools, "tools", required=True)


class Program(Tagged, tag="program"):
    call_id: str
    code: str
    fingerprint: str
    id: str = always("")


class ProgramOutput(Tagged, tag="program_output"):
    call_id: str
    result: str
    id: str = always("")
    status: ItemStatus | None = None
