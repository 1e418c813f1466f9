"""Structs of Chat Completions answers, in the variants that servers send. Fields that vary too much have type Any."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from antiphon.protocol.hosted import ImageGenerationCall
from antiphon.protocol.items import Reasoning

# The key of the text, and the characters of the text as they are in the JSON.
_TEXT = re.compile(rb'"content": ?"([^"\\]*(?:\\.[^"\\]*)*)"')
_DATA_URL = re.compile(r"data:image/([\w.+-]+);base64,", re.IGNORECASE)


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
    reasoning_text: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    tool_calls: list[ToolCallDelta | None] | None = None
    function_call: Function | None = None
    annotations: Any = None
    images: Any = None


def number_calls(message: MessageDelta) -> None:
    """Give each call of a whole message an index, unless it has an id: each is another call."""
    for index, call in enumerate(message.tool_calls or ()):
        if call is not None and call.index is None and not call.id:
            call.index = index


def number_parts(parts: Sequence[ToolCallDelta | None]) -> None:
    """Give parts that have neither an index nor an id their position: each belongs to another call."""
    if all(part is None or (part.index is None and not part.id) for part in parts):
        for position, part in enumerate(parts):
            if part is not None:
                part.index = position


class Choice(msgspec.Struct, gc=False):
    index: int | None = None
    delta: MessageDelta | None = None
    message: MessageDelta | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    error: Any = None
    usage: Any = None


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
    reasoning_text: _Empty = None
    thinking: _Empty = None
    reasoning_details: _Empty = None
    refusal: _Empty = None
    tool_calls: Annotated[list[ToolCallDelta | None], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None
    annotations: _Empty = None
    images: _Empty = None


class PlainChoice(Choice, kw_only=True, gc=False):
    delta: PlainDelta
    index: Literal[0] | None = None
    message: None = None
    finish_reason: None = None
    logprobs: None = None
    error: None = None
    usage: None = None


class PlainChunk(ChatChunk, kw_only=True, gc=False):
    """A chunk whose only content is a part of the text. Every value of it is a valid `ChatChunk`, too."""

    choices: tuple[PlainChoice]
    x_groq: None = None
    error: None = None
    object: Literal["chat.completion.chunk"] | None = None


class StartDelta(PlainDelta, kw_only=True, gc=False):
    """The start of an answer: the role, or the first part of the text."""

    content: str | None = None  # type: ignore[assignment]  # the part with the role has no text


class StartChoice(PlainChoice, kw_only=True, gc=False):
    delta: StartDelta


class StartChunk(PlainChunk, kw_only=True, gc=False):
    """A first chunk without anything but text. Every value of it is a valid `ChatChunk`, too."""

    choices: tuple[StartChoice]


class PlainWholeChoice(Choice, kw_only=True, gc=False):
    message: PlainDelta
    finish_reason: Literal["stop"]
    index: Literal[0] | None = None
    delta: None = None
    logprobs: None = None
    error: None = None
    usage: None = None


class PlainWhole(ChatChunk, kw_only=True, gc=False):
    """A whole answer that is text and nothing else. Every value of it is a valid `ChatChunk`, too."""

    choices: tuple[PlainWholeChoice]
    x_groq: None = None
    error: None = None
    object: Literal["chat.completion"] | None = None


decode_chunk = msgspec.json.Decoder(ChatChunk).decode
decode_plain_chunk = msgspec.json.Decoder(PlainChunk).decode
decode_start_chunk = msgspec.json.Decoder(StartChunk).decode
decode_plain_answer = msgspec.json.Decoder(PlainWhole).decode
decode_text = msgspec.json.Decoder(str).decode

TextFrame = tuple[bytes, bytes]
"""The bytes of a plain chunk up to the first quote of its text, and from the last one on.

Most chunks of an answer differ in the text only. A chunk with the same bytes around a JSON string is this chunk with
another text, so that only the string has to be decoded.
"""

_MAX_FRAME_BYTES = 4096
# No chunk matches it: the byte is not UTF-8.
NO_FRAME: TextFrame = (b"\xff", b"\xff")


def find_text_frame(data: bytes, text: str) -> TextFrame:
    """Return the frame of a plain chunk with this text.

    It is `NO_FRAME` if it is not certain which string is the text, or if the chunk has a usage, which must be read.
    """
    found = _TEXT.search(data) if len(data) <= _MAX_FRAME_BYTES else None
    if found is None:
        return NO_FRAME
    prefix, suffix = data[: found.start(1)], data[found.end(1) :]
    # Another field may have the same name. Only a change of the right one changes the text.
    changed = decode_plain_chunk(prefix + found[1] + b"." + suffix)
    is_text = changed.choices[0].delta.content == text + "."
    return (prefix, suffix) if is_text and changed.usage is None else NO_FRAME


def decode_damaged_chunk(data: bytes) -> ChatChunk:
    """Decode a chunk that is not valid JSON, or has numbers in strings. Raise ValueError or msgspec.ValidationError.

    NaN and infinity become null, and control characters in strings are kept. Arguments of calls are never changed.
    """
    constants: list[str] = []
    payload = json.loads(data.decode(), strict=False, parse_constant=constants.append)
    if isinstance(payload, dict) and isinstance(payload.get("choices"), list):
        payload["choices"] = [choice for choice in payload["choices"] if choice is not None]
    chunk = msgspec.convert(payload, ChatChunk, strict=False)
    if constants and _has_decoded_arguments(chunk):
        raise ValueError(f"The arguments of a call may contain {constants[0]}.")
    return chunk


def _has_decoded_arguments(chunk: ChatChunk) -> bool:
    """Return True if a call has arguments that are not text."""
    for choice in chunk.choices or ():
        for message in (choice.delta, choice.message):
            if message is not None:
                calls = [call.function for call in message.tool_calls or () if call is not None]
                if any(each and isinstance(each.arguments, dict | list) for each in (*calls, message.function_call)):
                    return True
    return False


def parse_image(payload: Any) -> ImageGenerationCall | str | None:
    """Return a generated image as an output item, or its address if it is not a data URL. None if there is no image."""
    image = payload.get("image_url") if isinstance(payload, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url:
        return None
    found = _DATA_URL.match(url)
    if found is None:
        return url
    return ImageGenerationCall("", "completed", result=url[found.end() :], output_format=found[1].lower())


FinishReason = Literal["stop", "length", "content_filter"]

# Words of OpenAI, Mistral, Gemini, GLM, DeepSeek, vLLM, Bedrock, and of Anthropic behind gateways.
_LENGTH = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
_FILTERED = {
    *("content_filter", "content_filtered", "guardrail_intervened", "refusal", "sensitive"),
    *("safety", "recitation", "blocklist", "prohibited_content", "spii"),
    *("image_safety", "image_recitation", "image_prohibited_content"),
}
_BROKEN = {"error", "abort", "cancelled", "network_error", "insufficient_system_resource"}
_CALLED = {"tool_calls", "function_call", "tool_use"}


def parse_finish_reason(word: str) -> FinishReason | None:
    """Map a `finish_reason`. Return None for a failure. Unknown reasons mean `stop`."""
    word = word.lower()
    if word in _BROKEN or "malformed_function_call" in word:
        return None
    if word in _LENGTH:
        return "length"
    # Gemini may append its own word: `content_filter: PROHIBITED_CONTENT`.
    return "content_filter" if word.partition(":")[0] in _FILTERED else "stop"


def is_finish_reason(word: str | None) -> bool:
    """Return True if a `finish_reason` is given. Some servers send the word `null` until the end."""
    return bool(word) and word != "null"


def announces_calls(word: str) -> bool:
    """Return True if a `finish_reason` means that the answer has tool calls."""
    return word.lower() in _CALLED


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
