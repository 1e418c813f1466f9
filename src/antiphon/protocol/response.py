"""The response object and its usage.

The 31 fields that Open Responses requires are always encoded. Other fields of the OpenAI API are encoded if set.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import Raw, Struct

from antiphon.protocol.content import OutputText
from antiphon.protocol.items import ITEMS, Message
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import ConversationRef, ImageOptions, PromptRef, ReasoningConfig, TextConfig, TextFormat
from antiphon.protocol.tools import CHOICE_WORDS, CHOICES, TOOLS, decode_choice
from antiphon.protocol.unions import Unknown, always, always_list, union_field

if TYPE_CHECKING:
    from antiphon.protocol.items import Item
    from antiphon.protocol.tools import Tool, ToolChoice

    Output: TypeAlias = list[Item | Unknown]
    EchoedTools: TypeAlias = list[Tool | Unknown]
    EchoedChoice: TypeAlias = Literal["none", "auto", "required"] | ToolChoice | Unknown
    Instructions: TypeAlias = str | list[Item | Unknown] | None
else:
    Output = union_field(lambda: ITEMS, many=True)
    EchoedTools = union_field(lambda: TOOLS, many=True)
    EchoedChoice = union_field(lambda: CHOICES, words=CHOICE_WORDS)
    Instructions = union_field(lambda: ITEMS, many=True, text=True, nullable=True)

Status = Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"]
FINAL_STATUSES = frozenset({"completed", "failed", "incomplete", "cancelled"})
IncompleteReason = Literal["max_output_tokens", "max_messages", "content_filter", "steered"]
ErrorCode = Literal[
    "server_error",
    "rate_limit_exceeded",
    "invalid_prompt",
    "data_residency_mismatch",
    "bio_policy",
    "misalignment_policy_violation",
    "vector_store_timeout",
    "invalid_image",
    "invalid_image_format",
    "invalid_base64_image",
    "invalid_image_url",
    "image_too_large",
    "image_too_small",
    "image_parse_error",
    "image_content_policy_violation",
    "invalid_image_mode",
    "image_file_too_large",
    "unsupported_image_media_type",
    "empty_image_file",
    "failed_to_download_image",
    "image_file_not_found",
]


class Reply(Struct, omit_defaults=True):
    """An object that a server sends. Unknown fields are ignored, because servers add fields."""


class InputTokensDetails(Reply):
    cached_tokens: int = always(0)
    cache_write_tokens: int = always(0)
    cache_write_tokens_details: JsonObject | None = None


class OutputTokensDetails(Reply):
    reasoning_tokens: int = always(0)


class Usage(Reply):
    """Token usage. `estimated` is an extension: the upstream reported no usage, so the numbers are estimates."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    estimated: bool = False

    def __add__(self, other: "Usage") -> "Usage":
        """Add two usages. The sum is an estimate if either is."""
        left, right = self.input_tokens_details, other.input_tokens_details
        reasoning = self.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.total_tokens + other.total_tokens,
            InputTokensDetails(
                left.cached_tokens + right.cached_tokens, left.cache_write_tokens + right.cache_write_tokens
            ),
            OutputTokensDetails(reasoning),
            estimated=self.estimated or other.estimated,
        )

    def __sub__(self, other: "Usage") -> "Usage":
        """Subtract a usage that is part of this one."""
        left, right = self.input_tokens_details, other.input_tokens_details
        reasoning = self.output_tokens_details.reasoning_tokens - other.output_tokens_details.reasoning_tokens
        return Usage(
            self.input_tokens - other.input_tokens,
            self.output_tokens - other.output_tokens,
            self.total_tokens - other.total_tokens,
            InputTokensDetails(
                left.cached_tokens - right.cached_tokens, left.cache_write_tokens - right.cache_write_tokens
            ),
            OutputTokensDetails(reasoning),
            estimated=self.estimated,
        )


class ResponseError(Reply):
    code: str
    message: str
    param: str | None = None
    type: str | None = None
    misalignment: JsonObject | None = None


class IncompleteDetails(Reply):
    reason: str


class CompactedResponse(Reply, kw_only=True):
    """The result of `POST /v1/responses/compact`: input items for the next request. It is not a stored response."""

    id: str
    object: Literal["response.compaction"] = always("response.compaction")
    created_at: int
    output: Output
    usage: Usage

    def __post_init__(self) -> None:
        self.output = ITEMS.decode_list_field(self.output, "output", required=True)


class Response(Reply, kw_only=True):
    id: str
    object: Literal["response"] = always("response")
    created_at: int | float
    completed_at: int | float | None = always(None)
    status: str = always("in_progress")
    background: bool = always(False)
    error: ResponseError | None = always(None)
    incomplete_details: IncompleteDetails | None = always(None)
    instructions: Instructions = always(None)
    max_output_tokens: int | None = always(None)
    max_tool_calls: int | None = always(None)
    model: str
    output: Output = always_list()
    parallel_tool_calls: bool = always(True)
    previous_response_id: str | None = always(None)
    reasoning: ReasoningConfig | None = always(None)
    service_tier: str = always("default")
    store: bool = always(True)
    temperature: float = always(1.0)
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(format=TextFormat()))
    tool_choice: EchoedChoice = always("auto")
    tools: EchoedTools = always_list()
    top_logprobs: int = always(0)
    top_p: float = always(1.0)
    presence_penalty: float = always(0.0)
    frequency_penalty: float = always(0.0)
    truncation: str = always("disabled")
    usage: Usage | None = always(None)
    metadata: dict[str, str] | None = always(None)
    prompt_cache_key: str | None = always(None)
    safety_identifier: str | None = always(None)
    conversation: ConversationRef | None = None
    prompt: PromptRef | None = None
    user: str | None = None
    image: ImageOptions | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_diagnostics: JsonObject | None = None
    access_programs: JsonObject | None = None
    input_transformations: list[JsonObject] | None = None
    moderation: Any = None
    tool_usage: JsonObject | None = None
    # An extension: the backend that served the response, and the model's name there.
    served_by: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.instructions, Raw):
            self.instructions = ITEMS.decode_text_or_list_field(self.instructions, "instructions")
        if isinstance(self.output, Raw):
            self.output = ITEMS.decode_list_field(self.output, "output", required=True)
        if isinstance(self.tools, Raw):
            self.tools = TOOLS.decode_list_field(self.tools, "tools", required=True)
        if isinstance(self.tool_choice, Raw):
            self.tool_choice = decode_choice(self.tool_choice, "tool_choice")

    @property
    def output_text(self) -> str:
        """The text of all output messages, joined as in the official SDK."""
        messages = (item.content for item in self.output if isinstance(item, Message))
        return "".join(part.text for parts in messages for part in parts if isinstance(part, OutputText))
