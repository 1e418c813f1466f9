"""The Messages API's event stream as deltas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.anthropic_messages.wire import (
    Block,
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
from antiphon.backends.upstream.failure import break_off, explain_event
from antiphon.errors import UpstreamError
from antiphon.protocol.content import UrlCitation
from antiphon.protocol.open import Unknown
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.sse import Message

Reason = Literal["stop", "length", "content_filter"]

# Every other reason is an answer that has come to its end.
_REASONS: dict[str, Reason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "refusal": "content_filter",
}


class _Open:
    """The block that is being written: there is never more than one."""

    def __init__(self, index: int | None, key: int, block: Block, raw: Raw) -> None:
        self.index = index
        self.key = key
        self.block = block
        self.raw = raw
        self.thinking: list[str] = [block.thinking or ""]
        self.signature: list[str] = [block.signature or ""]
        self.json: list[str] = []

    @property
    def arguments(self) -> str:
        """A call's arguments: as they came in pieces, else as they stood in the block."""
        whole = bytes(self.block.input).decode()
        return "".join(self.json) or ("{}" if whole in ("", "null") else whole)

    def assemble(self) -> Raw | dict[str, Raw]:
        """A block that only the upstream understands: hidden thinking, or what a tool of its own was asked and said."""
        if not self.json:
            return self.raw
        return msgspec.json.decode(self.raw, type=dict[str, Raw]) | {"input": Raw(self.arguments.encode())}


class MessagesReader:
    """Reads one answer. `names` are the tools' own names, by those they go by upstream."""

    def __init__(self, names: Mapping[str, str], *, secrets: Collection[str] = ()) -> None:
        self.finished = False
        self._names = names
        self._secrets = secrets
        self._open: _Open | None = None
        self._blocks = 0
        self._thoughts: list[Any] = []  # the blocks that only the upstream understands, since anything else was told
        self._said = 0  # how much text the message that is being told has
        self._cited_from = 0
        self._usage = TokenCounts()
        self._reason: str | None = None
        self._explanation: str | None = None

    def read(self, message: Message) -> Sequence[Delta]:
        if message.data.strip() in (b"", b"[DONE]"):
            return ()
        try:
            event = decode_event(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise UpstreamError("The upstream sent an event that cannot be read.") from None
        handle = self._HANDLERS.get(event.type)
        return handle(self, event, message.data) if handle is not None else ()

    def end(self) -> Sequence[Delta]:
        """Some servers close without `message_stop`. Once the reason to stop is told, the answer is whole."""
        if self._reason is None:
            raise break_off()
        return self._finish()

    # The message

    def _start(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        if event.message is not None:
            self._count(event.message.usage)
        return ()

    def _note(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        self._count(event.usage)
        if event.delta is not None:
            self._stop_for(event.delta.stop_reason, event.delta.stop_details)
        return ()

    def _stop(self, _event: StreamEvent, _: bytes) -> Sequence[Delta]:
        return self._finish()

    def _fail(self, _event: StreamEvent, data: bytes) -> Sequence[Delta]:
        raise explain_event(msgspec.json.decode(data), secrets=self._secrets)

    def _read_whole(self, _event: StreamEvent, data: bytes) -> Sequence[Delta]:
        """An answer that was not streamed."""
        message = msgspec.json.decode(data, type=WholeMessage)
        self._count(message.usage)
        self._stop_for(message.stop_reason, message.stop_details)
        told: list[Delta] = []
        for index, raw in enumerate(message.content or ()):
            told += self._open_block(index, raw)
            told += self._close_block()
        return [*told, *self._finish()]

    def _count(self, told: Raw) -> None:
        """The counts are running totals; a later report need not repeat what an earlier one said."""
        if not told:
            return
        usage = read_counts(told)
        for name in usage.__struct_fields__:
            if (value := getattr(usage, name)) is not None:
                setattr(self._usage, name, value)

    def _stop_for(self, reason: str | None, details: StopDetails | None) -> None:
        self._reason = reason or self._reason
        if details is not None:
            self._explanation = details.explanation or self._explanation

    def _finish(self) -> Sequence[Delta]:
        if self._reason is None and not self._blocks and not self._said:
            raise UpstreamError("The upstream ended its answer without having said anything.")
        told: list[Delta] = [*self._close_block(), *self._seal()]
        if self._reason == "refusal" and self._explanation:
            told.append(deltas.Refusal(self._explanation))
        if self._usage.input_tokens is not None or self._usage.output_tokens is not None:
            told.append(deltas.Tokens(_sum(self._usage)))
        self.finished = True
        return [*told, deltas.Finish(_REASONS.get(self._reason or "", "stop"))]

    # Its blocks

    def _start_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        # Some servers do not say that a block has ended.
        return (*self._close_block(), *self._open_block(event.index, event.content_block))

    def _open_block(self, index: int | None, raw: Raw) -> Sequence[Delta]:
        block = decode_block(raw)
        # Not every server counts its blocks right, and no call may be taken for another.
        key, self._blocks = self._blocks, self._blocks + 1
        self._open = _Open(index, key, block, raw)
        if block.type == "text":
            self._cited_from = 0 if self._thoughts else self._said
            told = self._say(block.text or "")
            return [*told, *(each for citation in block.citations or () for each in self._cite(citation))]
        if block.type == "thinking":
            return (deltas.Reasoning(block.thinking),) if block.thinking else ()
        if block.type == "tool_use":
            name = block.name or ""
            call = deltas.ToolCall(key, name=self._names.get(name, name), call_id=block.id)
            return self._turn_to(call)
        return ()

    def _extend_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        delta = event.delta
        if delta is None:
            return ()
        if delta.text is not None:  # nearly always
            return self._say(delta.text)
        if delta.citation:
            return self._cite(delta.citation)
        block = self._open
        if block is None or block.index != event.index:
            return ()
        if delta.partial_json is not None:
            block.json.append(delta.partial_json)
            is_call = block.block.type == "tool_use" and delta.partial_json
            return (deltas.ToolCall(block.key, delta.partial_json),) if is_call else ()
        if delta.thinking is not None:
            block.thinking.append(delta.thinking)
            return (deltas.Reasoning(delta.thinking),) if delta.thinking else ()
        block.signature.append(delta.signature or "")
        return ()

    def _stop_block(self, _event: StreamEvent, _: bytes) -> Sequence[Delta]:
        return self._close_block()

    def _close_block(self) -> Sequence[Delta]:
        block, self._open = self._open, None
        if block is None or block.block.type == "text":
            return ()
        if block.block.type == "tool_use":
            # What came in pieces is told already.
            return () if "".join(block.json) else (deltas.ToolCall(block.key, block.arguments),)
        if block.block.type == "thinking":
            self._thoughts.append(ThinkingBlock("".join(block.thinking), "".join(block.signature)))
        else:
            self._thoughts.append(block.assemble())
        return ()

    # What is told

    def _say(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        sealed = self._seal() if self._thoughts else ()
        self._said += len(text)
        return (*sealed, deltas.Text(text))

    def _cite(self, raw: Raw) -> Sequence[Delta]:
        citation = decode_citation(raw)
        if citation.type == "web_search_result_location" and citation.url:
            noted = UrlCitation(citation.url, citation.title or "", self._cited_from, self._said)
            return (*self._seal(), deltas.Annotate(noted))
        return (*self._seal(), deltas.Annotate(Unknown(bytes(raw))))

    def _turn_to(self, delta: Delta) -> Sequence[Delta]:
        """Tell something that is no text: what was being said ends there."""
        self._said = 0
        return (*self._seal(), delta)

    def _seal(self) -> Sequence[Delta]:
        """Something else is told now: what was thought before it, as it has to be given back."""
        if not self._thoughts:
            return ()
        sealed = msgspec.json.encode(self._thoughts).decode()
        self._thoughts = []
        self._said = 0
        return (deltas.ReasoningSeal(sealed),)

    _HANDLERS: ClassVar[dict[str, Callable[["MessagesReader", StreamEvent, bytes], Sequence[Delta]]]] = {
        "content_block_delta": _extend_block,
        "content_block_start": _start_block,
        "content_block_stop": _stop_block,
        "message_start": _start,
        "message_delta": _note,
        "message_stop": _stop,
        "message": _read_whole,
        "error": _fail,
    }


def _sum(usage: TokenCounts) -> Usage:
    """The upstream counts what came from its cache, or went into it, apart from the rest."""
    cached = max(usage.cache_read_input_tokens or 0, 0)
    written = max(usage.cache_creation_input_tokens or 0, 0)
    read = max(usage.input_tokens or 0, 0) + cached + written
    answered = max(usage.output_tokens or 0, 0)
    thought = usage.output_tokens_details.thinking_tokens if usage.output_tokens_details is not None else None
    return Usage(
        read, answered, read + answered, InputTokensDetails(cached, written), OutputTokensDetails(thought or 0)
    )
