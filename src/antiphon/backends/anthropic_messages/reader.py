"""The Messages API's event stream as deltas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.anthropic_messages.wire import (
    Block,
    BlockDelta,
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
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.sse import Message
from antiphon.upstream.error_mapping import break_off, decode_any, explain_event, is_error

# Every other block may be told more of as JSON: those of calls, and those that only the upstream understands.
_WORDS = ("text", "thinking")


class Draft:
    """A block so far. `key` is a number of ours: not every server counts its blocks right."""

    def __init__(self, index: int | None, key: int, block: Block, raw: Raw) -> None:
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
        """A call's arguments: as they came in pieces, else as they stood in the block."""
        whole = bytes(self.block.input).decode()
        return "".join(self.json) or ("{}" if whole in ("", "null") else whole)

    def assemble(self) -> ThinkingBlock | Raw | dict[str, Raw]:
        """A block to be given back as it was: thinking, or what a tool of the upstream's own was asked and said."""
        if self.type == "thinking":
            return ThinkingBlock("".join(self.thinking), "".join(self.signature))
        if not self.json:
            return self.raw
        return msgspec.json.decode(self.raw, type=dict[str, Raw]) | {"input": Raw(self.arguments.encode())}

    def takes(self, kind: str) -> bool:
        return self.type == kind if kind in _WORDS else self.type not in _WORDS


class Drafts:
    """All blocks that are open. Calls are written side by side; of others there is one at a time."""

    def __init__(self) -> None:
        self._open: list[Draft] = []

    def add(self, draft: Draft) -> list[Draft]:
        """Open a block. Those that have ended with that are returned: not every server says when one has."""
        over = [each for each in self._open if each.type != "tool_use" or _replaces(draft, each)]
        self._open = [*(each for each in self._open if each not in over), draft]
        return over

    def find(self, index: int | None, kind: str) -> Draft | None:
        """The block that a delta of this kind is about: by its index, or the last one if either has none."""
        for draft in reversed(self._open):
            if (index is None or draft.index is None or draft.index == index) and draft.takes(kind):
                return draft
        return None

    def remove(self, index: int | None) -> Draft | None:
        """The block that has ended; None if it had before."""
        for draft in reversed(self._open):
            if index is None or draft.index is None or draft.index == index:
                self._open.remove(draft)
                return draft
        return None

    def clear(self) -> list[Draft]:
        """All of them have ended."""
        over, self._open = self._open, []
        return over


def _replaces(draft: Draft, call: Draft) -> bool:
    return draft.type == "tool_use" and draft.index == call.index


def find_kind(delta: BlockDelta) -> str | None:
    """What a delta is more of; None if that is nothing, or nothing we know."""
    if delta.text:  # nearly always
        return "text"
    if delta.partial_json:
        return "json"
    return "thinking" if delta.thinking or delta.signature else None


Reason = Literal["stop", "length", "content_filter"]

# Every other reason is an answer that has come to its end.
_REASONS: dict[str, Reason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "refusal": "content_filter",
}
_UNANNOUNCED = {kind: Raw(msgspec.json.encode({"type": kind})) for kind in ("text", "thinking")}


class MessagesReader:
    """Reads one answer. `names` are the tools' own names, by those they go by upstream."""

    def __init__(self, names: Mapping[str, str], *, secrets: Collection[str] = ()) -> None:
        self.finished = False
        self._names = names
        self._secrets = secrets
        self._drafts = Drafts()
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
        if message.event == "error":
            raise self._explain(message.data)
        try:
            event = decode_event(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise UpstreamError("The upstream sent an event that cannot be read.") from None
        handle = self._HANDLERS.get(event.type)
        if handle is not None:
            return handle(self, event, message.data)
        # Some servers tell an error without saying in it that it is one.
        if not event.type and is_error(decode_any(message.data)):
            raise self._explain(message.data)
        return ()

    @property
    def concluded(self) -> bool:
        return self._reason is not None

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
        raise self._explain(data)

    def _explain(self, data: bytes) -> AntiphonError:
        return explain_event(decode_any(data), secrets=self._secrets)

    def _read_whole(self, _event: StreamEvent, data: bytes) -> Sequence[Delta]:
        """An answer that was not streamed."""
        message = msgspec.json.decode(data, type=WholeMessage)
        self._count(message.usage)
        self._stop_for(message.stop_reason, message.stop_details)
        told: list[Delta] = []
        for index, raw in enumerate(message.content or ()):
            told += self._open_block(index, raw)
            told += self._close(self._drafts.clear())
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
        told: list[Delta] = [*self._close(self._drafts.clear()), *self._seal()]
        if self._reason == "refusal" and self._explanation:
            told.append(deltas.Refusal(self._explanation))
        if self._usage.input_tokens is not None or self._usage.output_tokens is not None:
            told.append(deltas.Tokens(_sum(self._usage)))
        self.finished = True
        return [*told, deltas.Finish(_REASONS.get(self._reason or "", "stop"))]

    # Its blocks

    def _start_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        return self._open_block(event.index, event.content_block)

    def _open_block(self, index: int | None, raw: Raw) -> list[Delta]:
        block = decode_block(raw)
        draft = Draft(index, self._blocks, block, raw)
        self._blocks += 1
        told = self._close(self._drafts.add(draft))
        if block.type == "text":
            self._cited_from = 0 if self._thoughts else self._said
            told += self._say(block.text or "")
            told += (each for citation in block.citations or () for each in self._cite(citation))
        elif block.type == "thinking":
            told += self._think(block.thinking)
        elif block.type == "tool_use":
            name = block.name or ""
            told += self._turn_to(deltas.ToolCall(draft.key, name=self._names.get(name, name), call_id=block.id))
        return told

    def _extend_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        delta = event.delta
        if delta is None:
            return ()
        if delta.citation:
            return self._cite(delta.citation)
        kind = find_kind(delta)
        if kind is None:
            return ()
        told: list[Delta] = []
        draft = self._drafts.find(event.index, kind)
        if draft is None:
            if kind == "json":
                raise UpstreamError("The upstream sent more of a call, and did not say of which.")
            # Words and thoughts tell themselves what they are, and not every server announces them.
            told += self._open_block(event.index, _UNANNOUNCED[kind])
            draft = self._drafts.find(event.index, kind)
            assert draft is not None
        return [*told, *self._extend(draft, delta)]

    def _extend(self, draft: Draft, delta: BlockDelta) -> Sequence[Delta]:
        if delta.text:
            return self._say(delta.text)
        if delta.partial_json:
            draft.json.append(delta.partial_json)
            return (deltas.ToolCall(draft.key, delta.partial_json),) if draft.type == "tool_use" else ()
        draft.thinking.append(delta.thinking or "")
        draft.signature.append(delta.signature or "")
        return self._think(delta.thinking)

    def _stop_block(self, event: StreamEvent, _: bytes) -> Sequence[Delta]:
        draft = self._drafts.remove(event.index)
        return self._close([draft]) if draft is not None else ()

    def _close(self, drafts: Sequence[Draft]) -> list[Delta]:
        told: list[Delta] = []
        for draft in drafts:
            if draft.type == "tool_use":
                if not draft.json:  # what came in pieces is told already
                    told.append(deltas.ToolCall(draft.key, draft.arguments))
            elif draft.type != "text":
                self._thoughts.append(draft.assemble())
        return told

    # What is told

    def _say(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        sealed = self._seal() if self._thoughts else ()
        self._said += len(text)
        return (*sealed, deltas.Text(text))

    def _think(self, text: str | None) -> Sequence[Delta]:
        return (deltas.Reasoning(text),) if text else ()

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
