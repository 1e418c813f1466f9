"""Input and output items."""

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import msgspec

from antiphon.protocol.content import Content, OptionalParts, SummaryText
from antiphon.protocol.hosted import (
    AdditionalTools,
    AgentsSdkShellOutput,
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    ComputerCall,
    ComputerCallOutput,
    FileSearchCall,
    ImageGenerationCall,
    ItemStatus,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Program,
    ProgramOutput,
    ShellCall,
    ShellCallOutput,
    ToolSearchCall,
    ToolSearchOutput,
    WebSearchCall,
    convert_agents_sdk_output,
)
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import OpenUnion, Tagged, Unknown, Variant, Wire, always_list, union_field

Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
Phase: TypeAlias = Literal["commentary", "final_answer"]

LOST_OUTPUT = "No output was recorded for this call. Whether it was carried out is not known."
"""Sent to a model instead of a missing tool output, so that it neither repeats the call nor relies on it."""


class Message(Tagged, tag="message"):
    """A message in any of the three forms of the API: easy input, input, and output."""

    role: Role
    content: Content
    id: str | None = None
    status: ItemStatus | None = None
    phase: Phase | None = None


class FunctionCall(Tagged, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: str | None = None
    async_: bool | None = msgspec.field(default=None, name="async")
    caller: JsonObject | None = None
    created_by: str | None = None


class FunctionCallOutput(Tagged, tag="function_call_output"):
    output: Content
    call_id: str | None = None
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: JsonObject | None = None
    created_by: str | None = None


class CustomToolCall(Tagged, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: str | None = None
    async_: bool | None = msgspec.field(default=None, name="async")
    caller: JsonObject | None = None
    created_by: str | None = None


class CustomToolCallOutput(Tagged, tag="custom_tool_call_output"):
    call_id: str
    output: Content
    id: str | None = None
    status: ItemStatus | None = None
    caller: JsonObject | None = None
    created_by: str | None = None


class Reasoning(Tagged, tag="reasoning"):
    summary: list[SummaryText] = always_list()
    id: str | None = None
    content: OptionalParts = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class Compaction(Tagged, tag="compaction"):
    encrypted_content: str
    id: str | None = None
    created_by: str | None = None


class CompactionTrigger(Tagged, tag="compaction_trigger"):
    id: str | None = None


class ItemReference(Tagged, tag="item_reference"):
    id: str


class EffortUpdate(Wire):
    effort: str | None = None


class FormatUpdate(Wire):
    format: JsonObject


class ConfigurationUpdate(Tagged, tag="configuration_update"):
    id: str | None = None
    reasoning: EffortUpdate | None = None
    text: FormatUpdate | None = None


OutputItem = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | Reasoning
    | Compaction
    | FileSearchCall
    | WebSearchCall
    | ComputerCall
    | ComputerCallOutput
    | CodeInterpreterCall
    | ImageGenerationCall
    | LocalShellCall
    | LocalShellCallOutput
    | ShellCall
    | ShellCallOutput
    | ApplyPatchCall
    | ApplyPatchCallOutput
    | McpListTools
    | McpApprovalRequest
    | McpApprovalResponse
    | McpCall
    | ToolSearchCall
    | ToolSearchOutput
    | AdditionalTools
    | Program
    | ProgramOutput
)
Item = OutputItem | CompactionTrigger | ItemReference | ConfigurationUpdate


ITEMS: OpenUnion[Item] = OpenUnion(
    "Item",
    get_args(Item),
    untagged={"role": "message", "id": "item_reference"},
    variants={
        "local_shell_call_output": Variant("call_id", AgentsSdkShellOutput, convert_agents_sdk_output, absent="id")
    },
)

if TYPE_CHECKING:
    Items: TypeAlias = list[Item | Unknown]
else:
    Items = union_field(lambda: ITEMS, many=True)


UNKNOWN_ID_PREFIX = "item"
"""Prefix of the ids that this server gives to items of unknown types. Such items keep the ids of clients."""


def remove_own_id(item: Unknown) -> Unknown:
    """Return an item of an unknown type as its client sent it: without the id that this server has added."""
    if not (item.id or "").startswith(f"{UNKNOWN_ID_PREFIX}_"):
        return item
    fields = msgspec.json.decode(item.raw, type=dict[str, msgspec.Raw])
    del fields["id"]
    return Unknown(msgspec.json.encode(fields))
