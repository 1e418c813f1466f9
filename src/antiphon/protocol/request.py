"""Request bodies of `POST /v1/responses`, `…/input_tokens` and `…/compact`.

`CreateRequest` has all parameters of the OpenAI API and of Open Responses.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from antiphon.protocol.items import ITEMS
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tool_lists import TOOL_LISTS
from antiphon.protocol.tools import CHOICE_WORDS, CHOICES, TOOLS, decode_choice
from antiphon.protocol.unions import Tagged, Unknown, Wire, always, union_field

if TYPE_CHECKING:
    from antiphon.protocol.items import Item
    from antiphon.protocol.tools import Tool, ToolChoice

    OptionalInput: TypeAlias = str | list[Item | Unknown] | None
    OptionalTools: TypeAlias = list[Tool | Unknown] | None
    OptionalChoice: TypeAlias = Literal["none", "auto", "required"] | ToolChoice | Unknown | None
else:
    OptionalInput = union_field(lambda: ITEMS, many=True, text=True, nullable=True)
    OptionalTools = union_field(lambda: TOOLS, many=True, nullable=True)
    OptionalChoice = union_field(lambda: CHOICES, words=CHOICE_WORDS, nullable=True)

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
ENCRYPTED_REASONING = "reasoning.encrypted_content"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ModelName = Annotated[str, Meta(max_length=512)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class TextFormat(Tagged, tag="text"):
    pass


class JsonObjectFormat(Tagged, tag="json_object"):
    pass


class JsonSchemaFormat(Tagged, tag="json_schema"):
    """The `json_schema` format. A request must have a `schema`, which the engine checks; a response may have null."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = always(None)
    schema: JsonObject | None = always(None)
    strict: bool | None = always(None)


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


class TextConfig(Wire):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Wire):
    effort: Effort | None = always(None)
    summary: Literal["auto", "concise", "detailed"] | bool | None = always(None)
    context: str | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        # Some clients send a boolean instead of one of the strings.
        if isinstance(self.summary, bool):
            self.summary = "auto" if self.summary else None


class ContextManagement(Wire):
    type: str
    compact_threshold: Annotated[int, Meta(ge=1)] | None = None


class ConversationRef(Wire):
    id: str


class StreamOptions(Wire):
    include_obfuscation: bool | None = None


class PromptRef(Wire):
    id: str
    variables: JsonObject | None = None
    version: str | None = None


class PromptCacheOptions(Wire):
    comparison_response_id: str | None = None
    mode: Literal["implicit", "explicit"] | None = None
    prewarm: bool | None = None
    ttl: Literal["30m", "12h"] | None = None


class ImageOptions(Wire):
    context_compression: Literal["auto", "enabled", "disabled"] | None = None


class Moderation(Wire):
    model: str
    policy: JsonObject | None = None


class AccessPrograms(Wire):
    cyber: str | None = None


class CreateRequest(Wire, kw_only=True):
    model: ModelName | None = None
    input: OptionalInput = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    tools: OptionalTools = None
    tool_choice: OptionalChoice = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Include] | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[ContextManagement] | None = None
    prompt: PromptRef | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    image: ImageOptions | None = None
    moderation: Moderation | None = None
    access_programs: AccessPrograms | None = None
    client_metadata: Any = None
    # Only in a `response.create` message on a WebSocket.
    type: Literal["response.create"] | None = None
    generate: bool | None = None
    stream_id: str | None = None

    def __post_init__(self) -> None:
        self.input = ITEMS.decode_text_or_list_field(self.input, "input")
        self.tools = TOOL_LISTS.decode_field(self.tools, "tools")
        if self.tool_choice is not None:
            self.tool_choice = decode_choice(self.tool_choice, "tool_choice")


def get_conversation_id(request: CreateRequest) -> str | None:
    conversation = request.conversation
    return conversation if conversation is None or isinstance(conversation, str) else conversation.id


def wants_json(request: CreateRequest) -> bool:
    """Return True if the output must be JSON, with or without a schema."""
    return request.text is not None and isinstance(request.text.format, JsonSchemaFormat | JsonObjectFormat)


class CountRequest(Wire, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`: the parameters that affect the prompt."""

    model: ModelName
    input: OptionalInput = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    tools: OptionalTools = None
    tool_choice: OptionalChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def __post_init__(self) -> None:
        self.input = ITEMS.decode_text_or_list_field(self.input, "input")
        self.tools = TOOL_LISTS.decode_field(self.tools, "tools")
        if self.tool_choice is not None:
            self.tool_choice = decode_choice(self.tool_choice, "tool_choice")


class CompactRequest(Wire, kw_only=True):
    """The body of `POST /v1/responses/compact`."""

    model: ModelName
    input: OptionalInput = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: ServiceTier | None = None
    image: ImageOptions | None = None

    def __post_init__(self) -> None:
        self.input = ITEMS.decode_text_or_list_field(self.input, "input")
