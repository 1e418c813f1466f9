"""The fields of the Messages API's events that are read. All are optional, and unknown ones are ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from antiphon.upstream.usage import MAX_COUNT, select_counts

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None


class ThinkingTokens(Struct):
    thinking_tokens: _Count = None


class TokenCounts(Struct):
    input_tokens: _Count = None
    output_tokens: _Count = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None
    output_tokens_details: ThinkingTokens | None = None


class StopDetails(Struct):
    explanation: str | None = None


class BlockDelta(Struct):
    """The addition to a content block or, in `message_delta`, to the message."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    citation: Raw = Raw()
    stop_reason: str | None = None
    stop_details: StopDetails | None = None


class ContentBlock(Struct):
    type: str = ""
    id: str | int | None = None
    name: str | None = None
    input: Raw = Raw()
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    citations: list[Raw] | None = None


class WholeMessage(Struct):
    model: Any = None
    content: list[Raw] | None = None
    stop_reason: str | None = None
    stop_details: StopDetails | None = None
    usage: Raw = Raw()


class StreamEvent(Struct):
    type: str = ""
    index: int | None = None
    delta: BlockDelta | None = None
    content_block: Raw = Raw()
    message: WholeMessage | None = None
    usage: Raw = Raw()


class Citation(Struct):
    type: str = ""
    url: str | None = None
    title: str | None = None


class ThinkingBlock(Struct, tag="thinking"):
    """A thinking block in the form that the upstream accepts as input."""

    thinking: str
    signature: str


def read_counts(raw: Raw) -> TokenCounts:
    """Return the token counts. Impossible ones are left out: they must not fail the answer."""
    try:
        return _decode_counts(raw) or TokenCounts()
    except msgspec.DecodeError:
        payload: Any = msgspec.json.decode(raw)
        return select_counts(payload, TokenCounts) if isinstance(payload, dict) else TokenCounts()


_decode_counts = msgspec.json.Decoder(TokenCounts | None).decode
decode_event = msgspec.json.Decoder(StreamEvent).decode
decode_block = msgspec.json.Decoder(ContentBlock).decode
decode_citation = msgspec.json.Decoder(Citation).decode
