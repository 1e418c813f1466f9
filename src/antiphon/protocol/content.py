"""Content parts of messages, tool outputs and reasoning items, and their annotations."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from antiphon.protocol.unions import OpenUnion, Tagged, Unknown, Wire, always_list, typed_union_field


class PromptCacheBreakpoint(Wire):
    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class InputText(Tagged, tag="input_text"):
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class InputImage(Tagged, tag="input_image"):
    detail: Literal["low", "high", "auto", "original"] | None = None
    file_id: str | None = None
    image_url: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class InputFile(Tagged, tag="input_file"):
    detail: Literal["auto", "low", "high"] | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class AudioData(Wire):
    data: str
    format: Literal["mp3", "wav"]


class InputAudio(Tagged, tag="input_audio"):
    input_audio: AudioData


class InputVideo(Tagged, tag="input_video"):
    video_url: str


class FileCitation(Tagged, tag="file_citation"):
    file_id: str
    filename: str
    index: int


class UrlCitation(Tagged, tag="url_citation"):
    url: str
    title: str
    start_index: int
    end_index: int


class ContainerFileCitation(Tagged, tag="container_file_citation"):
    container_id: str
    file_id: str
    filename: str
    start_index: int
    end_index: int


class FilePath(Tagged, tag="file_path"):
    file_id: str
    index: int


Annotation = FileCitation | UrlCitation | ContainerFileCitation | FilePath
ANNOTATIONS: OpenUnion[Annotation] = OpenUnion("Annotation", get_args(Annotation))


class TopLogProb(Wire, gc=False):
    token: str
    logprob: float
    bytes: list[int] = always_list()


class LogProb(Wire, gc=False):
    token: str
    logprob: float
    bytes: list[int] = always_list()
    top_logprobs: list[TopLogProb] = always_list()


if TYPE_CHECKING:
    Annotations: TypeAlias = list[Annotation | Unknown]
else:
    Annotations = typed_union_field(ANNOTATIONS, null_is_default=True)


class OutputText(Tagged, tag="output_text"):
    text: str
    annotations: Annotations = always_list()
    logprobs: list[LogProb] | None = None


class Refusal(Tagged, tag="refusal"):
    refusal: str


class Text(Tagged, tag="text"):
    """Plain text in a stored message. Some clients also send it instead of `input_text`."""

    text: str


class SummaryText(Tagged, tag="summary_text"):
    text: str


class ReasoningText(Tagged, tag="reasoning_text"):
    text: str


class ComputerScreenshot(Tagged, tag="computer_screenshot"):
    file_id: str | None = None
    image_url: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


Part = (
    InputText
    | InputImage
    | InputFile
    | InputAudio
    | InputVideo
    | OutputText
    | Refusal
    | Text
    | SummaryText
    | ReasoningText
    | ComputerScreenshot
)
PARTS: OpenUnion[Part] = OpenUnion("Part", get_args(Part))

if TYPE_CHECKING:
    Content: TypeAlias = str | list[Part | Unknown]
    OptionalParts: TypeAlias = list[Part | Unknown] | None
else:
    Content = typed_union_field(PARTS, text=True)
    OptionalParts = typed_union_field(PARTS, nullable=True)


def extract_text(content: "str | list[Part | Unknown]") -> str:
    """Join the text of all parts of a message or tool output."""
    if isinstance(content, str):
        return content
    return "".join(_get_text(part) for part in content)


def _get_text(part: Any) -> str:
    if isinstance(part, Refusal):
        return part.refusal
    return getattr(part, "text", "")
