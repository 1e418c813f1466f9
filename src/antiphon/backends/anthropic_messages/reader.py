"""Translate the event stream of the Messages API into deltas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.anthropic_messages.wire import (
    BlockDelta,
    ContentBlock,
    StopDetails,
    StreamEvent,
    ThinkingBlock,
    TokenCounts,
    WholeMessage,
    decode_block,
    decode_citation,
    decode_event,
    read_counts,
)
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.content import UrlCitation
from antiphon.protocol.json_text import JSON_ERRORS
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.sse import SseMessage
from antiphon.upstream.error_mapping import (
    decode_json_or_text,
    is_error_payload,
    make_broken_stream_error,
    map_error_payload,
)
from antiphon.upstream.fields import ServedModel, read_list

_DEFAULT_LIMITS = AnswerLimits()

FinishReason = Literal["stop", "length", "content_filter"]

# All other stop reasons mean that the answer is complete.
_FINISH_REASONS: dict[str, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "refusal": "content_filter",
}
# All other block types can get JSON deltas: tool calls, and blocks that only the upstream understands.
_TEXT_TYPES = ("text", "thinking")
# Start events for blocks that a server has not announced.
_NO_BLOCK = (Raw(), Raw(b"null"))
_EMPTY_BLOCKS = {block_type: Raw(msgspec.json.encode({"type": block_type})) for block_type in _TEXT_TYPES}


class OpenBlock:
    """A content block in progress. `key` is our own number: not every server numbers its blocks correctly."""

    def __init__(self, index: int | None, key: int, block: ContentBlock, raw: Raw) -> None:
        self.index = index
        self.key = key
        self.block = block
        self.type = block.type
        self.raw = raw
        self.thinking: list[str] = [block.thinking or ""]
        self.signature: list[str] = [block.signature or ""]
        self.json: list[str] = []

    @property
    def arguments(self) -> str:
        """A call's arguments: the joined JSON deltas, else the input in the block."""
        whole = bytes(self.block.input).decode()
        if whole.startswith('"'):  # some gateways send the JSON as a string
            whole = msgspec.json.decode(whole, type=str)
        return "".join(self.json) or ("{}" if whole in ("", "null") else whole)

    def assemble(self) -> ThinkingBlock | Raw | dict[str, Raw]:
        """Return the block for a later request: thinking, or the upstream's own tool call or result."""
        if self.type == "thinking":
            return ThinkingBlock("".join(self.thinking), "".join(self.signature))
        if not self.json:
            return self.raw
        return msgspec.json.decode(self.raw, type=dict[str, Raw]) | {"input": Raw(self.arguments.encode())}

    def accepts(self, delta_type: str) -> bool:
        return self.type == delta_type if delta_type in _TEXT_TYPES else self.type not in _TEXT_TYPES


class OpenBlocks:
    """All content blocks in progress. Tool calls may overlap; any other block ends when the next one starts."""

    def __init__(self) -> None:
        self._blocks: list[OpenBlock] = []

    def add(self, block: OpenBlock) -> list[OpenBlock]:
        """Add a block. Return the blocks that end with it: not every server sends `content_block_stop`."""
        ended = [each for each in self._blocks if each.type != "tool_use" or _replaces(block, each)]
        self._blocks = [*(each for each in self._blocks if each not in ended), block]
        return ended

    def find(self, index: int | None, delta_type: str) -> OpenBlock | None:
        """Return the block that a delta extends: by its index, or the last one if either has no index."""
        for block in reversed(self._blocks):
            if (index is None or block.index is None or block.index == index) and block.accepts(delta_type):
                return block
        return None

    def remove(self, index: int | None) -> OpenBlock | None:
        """Remove the block that has ended and return it; None if it is already gone."""
        for block in reversed(self._blocks):
            if index is None or block.index is None or block.index == index:
                self._blocks.remove(block)
                return block
        return None

    def clear(self) -> list[OpenBlock]:
        """Remove all blocks and return them."""
        ended, self._blocks = self._blocks, []
        return ended


def _replaces(block: OpenBlock, call: OpenBlock) -> bool:
    return block.type == "tool_use" and block.index == call.index


class MessagesReader:
    """Reads one answer. `tool_names` maps the upstream names of tools to their own names.

    `estimate` returns the usage for the answer's text if the server sends no counts. An answer has at most as many
    content blocks as `limits` permit output items.
    """

    def __init__(
        self,
        tool_names: Mapping[str, str],
        *,
        secrets: Collection[str] = (),
        served_model: ServedModel | None = None,
        estimate: Callable[[str], Usage] | None = None,
        limits: AnswerLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.finished = False
        self._has_started = False
        self._served_model = served_model
        self._limits = limits
        self._tool_names = tool_names
        self._secrets = secrets
        self._estimate = estimate
        self._written: list[str] = []  # all text and arguments, for the estimate
        self._open = OpenBlocks()
        self._block_count = 0
        # Thinking and other opaque blocks, not yet emitted as a reasoning seal.
        self._unsealed: list[Any] = []
        self._text_length = 0  # of the output message in progress
        self._cited_from = 0
        self._counts = TokenCounts()
        self._stop_reason: str | None = None
        self._explanation: str | None = None

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if message.data.strip() in (b"", b"[DONE]"):
            return ()
        if message.event == "error":
            raise self._explain(message.data)
        try:
            event = decode_event(message.data)
        except JSON_ERRORS:
            raise UpstreamError("The upstream sent an invalid event.") from None
        handle = self._HANDLERS.get(event.type)
        if handle is not None:
            emitted = handle(self, event, message.data)
            return emitted if self._served_model is None or not emitted else self._announce(self._served_model, emitted)
        # Some servers send errors without a `type`.
        if not event.type and is_error_payload(decode_json_or_text(message.data)):
            raise self._explain(message.data)
        return ()

    def _announce(self, served_model: ServedModel, emitted: Sequence[Delta]) -> Sequence[Delta]:
        self._served_model = None
        return served_model.announce(emitted)

    @property
    def is_complete(self) -> bool:
        return self._stop_reason is not None

    def end(self) -> Sequence[Delta]:
        """Finish a stream that closed without `message_stop`. It is complete if it has a stop reason."""
        if self._stop_reason is None:
            raise make_broken_stream_error()
        return self._finish()

    # Messages

    def _start_message(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        if self._has_started and self._block_count:  # before the first block, a proxy has tried again
            raise UpstreamError("The upstream started a second message within one answer.")
        self._has_started = True
        self._counts, self._stop_reason, self._explanation = TokenCounts(), None, None
        if event.message is not None:
            self._observe_model(event.message)
            self._add_counts(event.message.usage)
        return ()

    def _extend_message(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        self._add_counts(event.usage)
        if event.delta is not None:
            self._set_stop_reason(event.delta.stop_reason, event.delta.stop_details)
        return ()

    def _stop_message(self, _event: StreamEvent, _: bytes) -> Sequence[Delta]:
        return self._finish()

    def _fail(self, _event: StreamEvent, data: bytes) -> Sequence[Delta]:
        raise self._explain(data)

    def _explain(self, data: bytes) -> AntiphonError:
        return map_error_payload(decode_json_or_text(data), secrets=self._secrets)

    def _read_whole(self, _event: StreamEvent, data: bytes) -> Sequence[Delta]:
        """Read an answer that was not streamed."""
        message = msgspec.json.decode(data, type=WholeMessage)
        self._observe_model(message)
        self._add_counts(message.usage)
        self._set_stop_reason(message.stop_reason, message.stop_details)
        emitted: list[Delta] = []
        for index, raw in enumerate(message.content or ()):
            emitted += self._open_block(index, raw)
            emitted += self._close_blocks(self._open.clear())
        return [*emitted, *self._finish()]

    def _observe_model(self, message: WholeMessage) -> None:
        if self._served_model is not None:
            self._served_model.observe(message.model)

    def _add_counts(self, raw: Raw) -> None:
        """Add a token report. Its counts are totals, and counts it leaves out do not change."""
        if not raw:
            return
        counts = read_counts(raw)
        for name in counts.__struct_fields__:
            if (value := getattr(counts, name)) is not None:
                setattr(self._counts, name, value)

    def _set_stop_reason(self, reason: str | None, details: StopDetails | None) -> None:
        self._stop_reason = reason or self._stop_reason
        if details is not None:
            self._explanation = details.explanation or self._explanation

    def _finish(self) -> Sequence[Delta]:
        if not self._block_count:
            if self._stop_reason is None:
                raise UpstreamError("The upstream ended its answer without any output.")
            if self._stop_reason == "tool_use":
                raise UpstreamError("The upstream announced tool calls but sent none.")
        emitted: list[Delta] = [*self._close_blocks(self._open.clear()), *self._emit_seal()]
        if self._stop_reason == "refusal" and self._explanation:
            emitted.append(deltas.Refusal(self._explanation))
        if self._counts.input_tokens is not None or self._counts.output_tokens is not None:
            emitted.append(deltas.TokenUsage(_sum_usage(self._counts)))
        elif self._estimate is not None:
            emitted.append(deltas.TokenUsage(self._estimate("".join(self._written))))
        self.finished = True
        return [*emitted, deltas.Finish(_FINISH_REASONS.get(self._stop_reason or "", "stop"))]

    # Content blocks

    def _start_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        # The deltas of a block without content open it.
        return self._open_block(event.index, event.content_block) if event.content_block not in _NO_BLOCK else ()

    def _open_block(self, index: int | None, raw: Raw) -> list[Delta]:
        if self._block_count >= self._limits.max_answer_items:
            raise self._limits.make_error("max_answer_items")
        block = decode_block(raw)
        opened = OpenBlock(index, self._block_count, block, raw)
        self._block_count += 1
        emitted = self._close_blocks(self._open.add(opened))
        if block.type == "text":
            self._cited_from = 0 if self._unsealed else self._text_length
            emitted += self._emit_text(block.text or "")
            emitted += (delta for citation in read_list(block.citations) for delta in self._emit_citation(citation))
        elif block.type == "thinking":
            emitted += self._emit_reasoning(block.thinking)
        elif block.type == "tool_use":
            name = block.name or ""
            self._written.append(name)
            call_id = str(block.id) if block.id is not None else None
            call = deltas.ToolCall(opened.key, name=self._tool_names.get(name, name), call_id=call_id)
            emitted += self._emit_call_start(call)
        return emitted

    def _extend_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        delta = event.delta
        if delta is None:
            return ()
        if delta.citation:
            return self._emit_citation(delta.citation)
        delta_type = _find_delta_type(delta)
        if delta_type is None:
            return ()
        emitted: list[Delta] = []
        block = self._open.find(event.index, delta_type)
        if block is None:
            if delta_type == "json":
                raise UpstreamError("The upstream sent a JSON delta for a content block that it has not started.")
            # Not every server starts text and thinking blocks, and their deltas are self-describing.
            emitted += self._open_block(event.index, _EMPTY_BLOCKS[delta_type])
            block = self._open.find(event.index, delta_type)
            assert block is not None
        return [*emitted, *self._add_delta(block, delta)]

    def _add_delta(self, block: OpenBlock, delta: BlockDelta) -> Sequence[Delta]:
        if delta.text:
            return self._emit_text(delta.text)
        if delta.partial_json:
            block.json.append(delta.partial_json)
            self._written.append(delta.partial_json)
            return (deltas.ToolCall(block.key, delta.partial_json),) if block.type == "tool_use" else ()
        block.thinking.append(delta.thinking or "")
        block.signature.append(delta.signature or "")
        return self._emit_reasoning(delta.thinking)

    def _stop_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        block = self._open.remove(event.index)
        return self._close_blocks([block]) if block is not None else ()

    def _close_blocks(self, blocks: Sequence[OpenBlock]) -> list[Delta]:
        emitted: list[Delta] = []
        for block in blocks:
            if block.type == "tool_use":
                if not block.json:  # JSON deltas have been emitted already
                    self._written.append(block.arguments)
                    emitted.append(deltas.ToolCall(block.key, block.arguments))
            elif block.type != "text":
                self._unsealed.append(block.assemble())
        return emitted

    # Deltas

    def _emit_text(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        seal = self._emit_seal() if self._unsealed else ()
        self._text_length += len(text)
        self._written.append(text)
        return (*seal, deltas.Text(text))

    def _emit_reasoning(self, text: str | None) -> Sequence[Delta]:
        if not text:
            return ()
        self._written.append(text)
        return (deltas.Reasoning(text),)

    def _emit_citation(self, raw: Raw) -> Sequence[Delta]:
        citation = decode_citation(raw)
        if citation.type == "web_search_result_location" and citation.url:
            annotation = UrlCitation(citation.url, citation.title or "", self._cited_from, self._text_length)
            return (*self._emit_seal(), deltas.Annotate(annotation))
        return (*self._emit_seal(), deltas.Annotate(Unknown(bytes(raw))))

    def _emit_call_start(self, call: Delta) -> Sequence[Delta]:
        self._text_length = 0  # a call ends the output message
        return (*self._emit_seal(), call)

    def _emit_seal(self) -> Sequence[Delta]:
        """Emit the opaque blocks so far as a reasoning seal. It ends the output message."""
        if not self._unsealed:
            return ()
        seal = msgspec.json.encode(self._unsealed).decode()
        self._unsealed = []
        self._text_length = 0
        return (deltas.ReasoningSeal(seal),)

    _HANDLERS: ClassVar[dict[str, Callable[["MessagesReader", StreamEvent, bytes], Sequence[Delta]]]] = {
        "content_block_delta": _extend_block,
        "content_block_start": _start_block,
        "content_block_stop": _stop_block,
        "message_start": _start_message,
        "message_delta": _extend_message,
        "message_stop": _stop_message,
        "message": _read_whole,
        "error": _fail,
    }


def _find_delta_type(delta: BlockDelta) -> str | None:
    """Return the block type that a delta extends; None for an empty or unknown delta."""
    if delta.text:  # the most frequent case
        return "text"
    if delta.partial_json:
        return "json"
    return "thinking" if delta.thinking or delta.signature else None


def _sum_usage(counts: TokenCounts) -> Usage:
    """Return the usage. The upstream's input count excludes tokens read from its cache or written to it."""
    cached = counts.cache_read_input_tokens or 0
    written = counts.cache_creation_input_tokens or 0
    input_tokens = (counts.input_tokens or 0) + cached + written
    output_tokens = counts.output_tokens or 0
    details = counts.output_tokens_details
    thinking = details.thinking_tokens if details is not None else None
    return Usage(
        input_tokens,
        output_tokens,
        input_tokens + output_tokens,
        InputTokensDetails(cached, written),
        OutputTokensDetails(min(thinking or 0, output_tokens)),
    )
