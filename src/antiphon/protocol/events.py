"""Stream events of the lifecycle, output items, messages, reasoning, tool calls and errors."""

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Raw, Struct

from antiphon.protocol.content import ANNOTATIONS, PARTS, LogProb, SummaryText
from antiphon.protocol.items import ITEMS
from antiphon.protocol.response import Reply, Response
from antiphon.protocol.unions import Unknown, always, always_list, union_field

if TYPE_CHECKING:
    from antiphon.protocol.content import Annotation, Part
    from antiphon.protocol.items import Item

    OneItem: TypeAlias = Item | Unknown
    OnePart: TypeAlias = Part | Unknown
    OneAnnotation: TypeAlias = Annotation | Unknown | None
else:
    OneItem = union_field(lambda: ITEMS)
    OnePart = union_field(lambda: PARTS)
    OneAnnotation = union_field(lambda: ANNOTATIONS, nullable=True)


class Event(Struct, omit_defaults=True, gc=False, tag_field="type"):
    """A stream event. `sequence_number` increases by one per event and is the cursor for resuming a stream."""

    sequence_number: int

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


class Lifecycle(Event):
    response: Response


class Created(Lifecycle, tag="response.created"):
    pass


class Queued(Lifecycle, tag="response.queued"):
    pass


class InProgress(Lifecycle, tag="response.in_progress"):
    pass


class Completed(Lifecycle, tag="response.completed"):
    pass


class Failed(Lifecycle, tag="response.failed"):
    pass


class Incomplete(Lifecycle, tag="response.incomplete"):
    pass


TERMINAL = (Completed, Failed, Incomplete)


class ErrorPayload(Reply):
    type: str
    code: str | None
    message: str
    param: str | None
    headers: dict[str, str] | None = None


class Error(Event, tag="error"):
    """An error in the nested form of Open Responses: the official SDK raises only if there is an `error` key."""

    error: ErrorPayload


class OutputItemEvent(Event):
    """An event with an output item. The item may have unknown fields and, while in progress, may lack required ones."""

    output_index: int
    item: OneItem

    def __post_init__(self) -> None:
        if isinstance(self.item, Raw):
            self.item = ITEMS.decode_lossless_field(self.item, "item")


class OutputItemAdded(OutputItemEvent, tag="response.output_item.added"):
    pass


class OutputItemDone(OutputItemEvent, tag="response.output_item.done"):
    pass


class ItemEvent(Event):
    """An event about one output item."""

    item_id: str
    output_index: int


class ContentEvent(ItemEvent):
    """An event about one content part of an item."""

    content_index: int


class ContentPartEvent(ContentEvent):
    part: OnePart

    def __post_init__(self) -> None:
        if isinstance(self.part, Raw):
            self.part = PARTS.decode_field(self.part, "part", required=True)


class ContentPartAdded(ContentPartEvent, tag="response.content_part.added"):
    pass


class ContentPartDone(ContentPartEvent, tag="response.content_part.done"):
    pass


class OutputTextDelta(ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[LogProb] = always_list()
    obfuscation: str | None = None


class OutputTextDone(ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[LogProb] = always_list()


class OutputTextAnnotationAdded(ContentEvent, tag="response.output_text.annotation.added"):
    annotation_index: int
    annotation: OneAnnotation = always(None)

    def __post_init__(self) -> None:
        self.annotation = ANNOTATIONS.decode_field(self.annotation, "annotation")


class RefusalDelta(ContentEvent, tag="response.refusal.delta"):
    delta: str
    obfuscation: str | None = None


class RefusalDone(ContentEvent, tag="response.refusal.done"):
    refusal: str


class ReasoningTextDelta(ContentEvent, tag="response.reasoning_text.delta"):
    delta: str
    obfuscation: str | None = None


class ReasoningTextDone(ContentEvent, tag="response.reasoning_text.done"):
    text: str


class ReasoningDelta(ReasoningTextDelta, tag="response.reasoning.delta"):
    """Open Responses' name for `response.reasoning_text.delta`."""


class ReasoningDone(ReasoningTextDone, tag="response.reasoning.done"):
    """Open Responses' name for `response.reasoning_text.done`."""


class SummaryEvent(ItemEvent):
    summary_index: int


class ReasoningSummaryPartAdded(SummaryEvent, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class ReasoningSummaryPartDone(SummaryEvent, tag="response.reasoning_summary_part.done"):
    part: SummaryText
    status: str | None = None


class ReasoningSummaryTextDelta(SummaryEvent, tag="response.reasoning_summary_text.delta"):
    delta: str
    obfuscation: str | None = None


class ReasoningSummaryTextDone(SummaryEvent, tag="response.reasoning_summary_text.done"):
    text: str


class FunctionCallArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str
    obfuscation: str | None = None


class FunctionCallArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: str
    name: str | None = None


class CustomToolCallInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str
    obfuscation: str | None = None


class CustomToolCallInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


class CompactionCompacting(ItemEvent, tag="response.compaction.compacting"):
    pass


CORE_EVENTS: tuple[type[Any], ...] = (
    Created,
    Queued,
    InProgress,
    Completed,
    Failed,
    Incomplete,
    Error,
    OutputItemAdded,
    OutputItemDone,
    ContentPartAdded,
    ContentPartDone,
    OutputTextDelta,
    OutputTextDone,
    OutputTextAnnotationAdded,
    RefusalDelta,
    RefusalDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningSummaryPartAdded,
    ReasoningSummaryPartDone,
    ReasoningSummaryTextDelta,
    ReasoningSummaryTextDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    CompactionCompacting,
)


def is_delta(event: object) -> bool:
    """Return True for an event with a part of the output. All others may repeat the whole."""
    return hasattr(event, "delta")
