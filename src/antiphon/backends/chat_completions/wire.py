"""Structs of Chat Completions answers, in the variants that servers send. Fields that vary too much have type Any."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from antiphon.protocol.content import Annotation, UrlCitation
from antiphon.protocol.items import Reasoning
from antiphon.protocol.unions import Unknown


class Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: Any = None


class ToolCallDelta(msgspec.Struct, gc=False):
    """A tool call, or a part of one."""

    index: int | None = None
    id: str | int | None = None
    function: Function | None = None
    extra_content: Any = None


class MessageDelta(msgspec.Struct, gc=False):
    """A part of the answer (`delta`), or the whole answer (`message`)."""

    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    tool_calls: list[ToolCallDelta | None] | None = None
    function_call: Function | None = None
    annotations: Any = None


def number_calls(message: MessageDelta) -> None:
    """Give each call of a whole message an index, unless it has an id: each is another call."""
    for index, call in enumerate(message.tool_calls or ()):
        if call is not None and call.index is None and not call.id:
            call.index = index


class Choice(msgspec.Struct, gc=False):
    index: int | None = None
    delta: MessageDelta | None = None
    message: MessageDelta | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    error: Any = None


class ChatChunk(msgspec.Struct, gc=False):
    model: Any = None
    choices: Sequence[Choice] | None = None
    usage: Any = None
    x_groq: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None

    def is_error(self) -> bool:
        if self.error or self.object == "error":
            return True
        # Some servers send the bare error object. A chunk without choices has none of these fields.
        return self.choices is None and bool(self.message or self.detail)


# The value of a field that adds nothing to a chunk.
_Empty = None | Literal[""] | Annotated[list[Any], msgspec.Meta(max_length=0)]


class PlainDelta(MessageDelta, kw_only=True, gc=False):
    """A part of the answer that is text and nothing else."""

    content: Annotated[str, msgspec.Meta(min_length=1)]
    reasoning_content: _Empty = None
    reasoning: _Empty = None
    reasoning_details: _Empty = None
    refusal: _Empty = None
    tool_calls: Annotated[list[ToolCallDelta | None], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None
    annotations: _Empty = None


class PlainChoice(Choice, kw_only=True, gc=False):
    delta: PlainDelta
    index: Literal[0] | None = None
    message: None = None
    finish_reason: None = None
    logprobs: None = None
    error: None = None


class PlainChunk(ChatChunk, kw_only=True, gc=False):
    """A chunk whose only content is a part of the text. Every value of it is a valid `ChatChunk`, too."""

    choices: tuple[PlainChoice]
    x_groq: None = None
    error: None = None
    object: Literal["chat.completion.chunk"] | None = None


class PlainWholeChoice(Choice, kw_only=True, gc=False):
    message: PlainDelta
    finish_reason: Literal["stop"]
    index: Literal[0] | None = None
    delta: None = None
    logprobs: None = None
    error: None = None


class PlainWhole(ChatChunk, kw_only=True, gc=False):
    """A whole answer that is text and nothing else. Every value of it is a valid `ChatChunk`, too."""

    choices: tuple[PlainWholeChoice]
    x_groq: None = None
    error: None = None
    object: Literal["chat.completion"] | None = None


decode_chunk = msgspec.json.Decoder(ChatChunk).decode
decode_plain_chunk = msgspec.json.Decoder(PlainChunk).decode
decode_plain_answer = msgspec.json.Decoder(PlainWhole).decode


def parse_annotation(payload: Any) -> "Annotation | Unknown | None":
    """Return an annotation of the Responses API. Unknown types are kept unchanged."""
    if not isinstance(payload, Mapping) or not isinstance(payload.get("type"), str):
        return None
    cited = payload.get("url_citation", payload)
    if payload["type"] != "url_citation" or not isinstance(cited, Mapping) or not isinstance(cited.get("url"), str):
        return Unknown(msgspec.json.encode(payload))
    start, end = _parse_index(cited.get("start_index")), _parse_index(cited.get("end_index"))
    return UrlCitation(cited["url"], str(cited.get("title") or ""), start, end)


def _parse_index(value: Any) -> int:
    return value if isinstance(value, int) else 0


FinishReason = Literal["stop", "length", "content_filter"]

_LENGTH = {"length", "max_tokens", "max_output_tokens", "model_length"}
_FILTERED = {"content_filter", "safety", "recitation", "sensitive", "blocklist", "prohibited_content"}
_BROKEN = {"error", "abort", "cancelled", "network_error", "insufficient_system_resource"}


def parse_finish_reason(word: str) -> FinishReason | None:
    """Map a `finish_reason`. Return None for a failure. Unknown reasons mean `stop`."""
    word = word.lower()
    if word in _BROKEN or "malformed_function_call" in word:
        return None
    if word in _LENGTH:
        return "length"
    return "content_filter" if word in _FILTERED else "stop"


_GROWING = ("text", "summary", "data")


class OpaqueState(msgspec.Struct, omit_defaults=True, tag_field="of", tag="chat_completions"):
    """Opaque upstream state, carried to the client in a reasoning item and returned to the upstream unchanged.

    `details` are OpenRouter's `reasoning_details`. `calls` has the `extra_content` of calls by call id.
    """

    details: list[dict[str, Any]] = []
    calls: dict[str, Any] = {}

    def add_detail(self, detail: dict[str, Any]) -> None:
        """Append to the last detail if type, index and id are the same. Else add the detail."""
        last = self.details[-1] if self.details else {}
        is_other = any(last.get(name) != detail.get(name) for name in ("type", "index"))
        # Only the first part of a streamed detail has its id.
        if not last or is_other or (detail.get("id") and last.get("id") and detail["id"] != last["id"]):
            self.details.append(dict(detail))
            return
        for name, value in detail.items():
            if name in _GROWING and isinstance(value, str) and isinstance(last.get(name), str):
                last[name] += value
            elif value is not None:
                last[name] = value

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def parse_opaque_state(item: Reasoning) -> OpaqueState:
    """Return the state in a reasoning item. It is empty if another backend wrote the item."""
    try:
        return msgspec.json.decode(item.encrypted_content or "{}", type=OpaqueState)
    except msgspec.DecodeError:
        return OpaqueState()
