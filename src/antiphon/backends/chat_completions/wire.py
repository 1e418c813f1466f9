"""What comes back from Chat Completions, in all the shapes that servers give it. What varies too much is left open."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from antiphon.protocol.content import Annotation, UrlCitation
from antiphon.protocol.items import Reasoning
from antiphon.protocol.unions import Unknown


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class CallPiece(msgspec.Struct):
    """A call, or a piece of one."""

    index: int | None = None
    id: str | int | None = None
    function: Function | None = None
    extra_content: Any = None


class Said(msgspec.Struct):
    """More of the answer (`delta`), or all of it (`message`)."""

    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    refusal: Any = None
    tool_calls: list[CallPiece | None] | None = None
    function_call: Function | None = None
    annotations: Any = None

    def is_plain(self) -> bool:
        """Whether there is text, and nothing else."""
        return (
            type(self.content) is str
            and bool(self.content)
            and not self.reasoning_content
            and not self.reasoning
            and not self.reasoning_details
            and not self.refusal
            and not self.tool_calls
            and self.function_call is None
            and not self.annotations
        )


class Choice(msgspec.Struct):
    index: int | None = None
    delta: Said | None = None
    message: Said | None = None
    finish_reason: str | None = None
    logprobs: Any = None
    error: Any = None

    def is_plain(self) -> bool:
        """Whether there is nothing beside what is said."""
        return self.finish_reason is None and self.logprobs is None and not self.error and self.message is None


class Chunk(msgspec.Struct):
    model: Any = None
    choices: list[Choice] | None = None
    usage: Any = None
    x_groq: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None

    def is_error(self) -> bool:
        if self.error or self.object == "error":
            return True
        # Some servers put the bare error there, and a chunk without choices has none of these.
        return self.choices is None and bool(self.message or self.detail)


decode_chunk = msgspec.json.Decoder(Chunk).decode


def read_annotation(told: Any) -> "Annotation | Unknown | None":
    """An annotation as this API has it: flat. What is of another kind is kept as it is."""
    if not isinstance(told, Mapping) or not isinstance(told.get("type"), str):
        return None
    cited = told.get("url_citation", told)
    if told["type"] != "url_citation" or not isinstance(cited, Mapping) or not isinstance(cited.get("url"), str):
        return Unknown(msgspec.json.encode(told))
    return UrlCitation(
        cited["url"], str(cited.get("title") or ""), _place(cited.get("start_index")), _place(cited.get("end_index"))
    )


def _place(told: Any) -> int:
    return told if isinstance(told, int) else 0


Reason = Literal["stop", "length", "content_filter"]

_LENGTH = {"length", "max_tokens", "max_output_tokens", "model_length"}
_FILTERED = {"content_filter", "safety", "recitation", "sensitive", "blocklist", "prohibited_content"}
_BROKEN = {"error", "abort", "cancelled", "network_error", "insufficient_system_resource"}


def read_ending(word: str) -> Reason | None:
    """What this word for the end means; None for one that is no end, but a failure. New words mean that it is done."""
    word = word.lower()
    if word in _BROKEN or "malformed_function_call" in word:
        return None
    if word in _LENGTH:
        return "length"
    return "content_filter" if word in _FILTERED else "stop"


_GROWING = ("text", "summary", "data")


class OpaqueState(msgspec.Struct, omit_defaults=True, tag_field="of", tag="chat_completions"):
    """`details` are OpenRouter's `reasoning_details`; `calls` holds the `extra_content` of calls, by call id."""

    details: list[dict[str, Any]] = []
    calls: dict[str, Any] = {}

    def add_detail(self, detail: dict[str, Any]) -> None:
        """More of the details: a piece of the last one, if it is of the same kind and has its index, or another."""
        last = self.details[-1] if self.details else {}
        if not last or any(last.get(name) != detail.get(name) for name in ("type", "index")):
            self.details.append(dict(detail))
            return
        for name, value in detail.items():
            if name in _GROWING and isinstance(value, str) and isinstance(last.get(name), str):
                last[name] += value
            elif value is not None:
                last[name] = value

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


def parse_opaque_state(item: Reasoning) -> OpaqueState:
    """What this item keeps for us. One that some other model has sealed keeps nothing."""
    try:
        return msgspec.json.decode(item.encrypted_content or "{}", type=OpaqueState)
    except msgspec.DecodeError:
        return OpaqueState()
