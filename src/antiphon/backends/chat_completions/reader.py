"""From the chunks of a Chat Completions stream to deltas.

An answer is over when the server says `[DONE]`, or closes the stream after a `finish_reason`. The chunk with that
reason is not the last: the usage comes after it, and some servers give several calls a chunk with a reason each. So a
reason is no word for a call that comes after it: the stream has broken off if it closes in the middle of that.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.text import Speech
from antiphon.backends.chat_completions.tool_calls import Calls
from antiphon.backends.chat_completions.wire import (
    CallPiece,
    Choice,
    Chunk,
    OpaqueState,
    Reason,
    Said,
    decode_chunk,
    read_annotation,
    read_ending,
)
from antiphon.errors import UpstreamError
from antiphon.protocol.content import LogProb
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import (
    Annotate,
    Delta,
    Finish,
    Reasoning,
    ReasoningSeal,
    ReasoningSummary,
    Refusal,
    Text,
    TokenUsage,
    ToolCall,
)
from antiphon.stream.sse import SseMessage
from antiphon.upstream.error_mapping import (
    decode_json_or_text,
    is_error_payload,
    make_broken_stream_error,
    map_error_payload,
)
from antiphon.upstream.fields import ServedModel, parse_logprobs
from antiphon.upstream.usage import parse_usage

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ChatReader:
    """Reads one answer. `estimate` makes the usage from the answer's text if the server tells none.

    `secrets` are what errors must not show, and `served_model` tells who answers.
    """

    def __init__(
        self,
        quirks: Quirks,
        *,
        estimate: Callable[[str], Usage],
        secrets: Collection[str] = (),
        served_model: ServedModel | None = None,
    ) -> None:
        self.finished = False
        self._served_model = served_model
        self._quirks = quirks
        self._estimate = estimate
        self._secrets = secrets
        self._speech = Speech(tags=quirks.thinking_tags, thinking=quirks.thinking_open)
        self._calls = Calls()
        self._kept = OpaqueState()
        self._usage: Usage | None = None
        self._reason: Reason | None = None
        self._said: list[str] = []
        self._has_spoken = False

    @property
    def is_complete(self) -> bool:
        """Where there are calls, others may follow, with a reason of their own."""
        return self._reason is not None and not self._calls

    def read(self, message: SseMessage) -> Sequence[Delta]:
        data = message.data
        if not data.startswith(b"{"):
            data = data.strip()
            if data in (b"", b"[DONE]"):
                return self._finish() if data else ()
        chunk = self._decode(data, named_error=message.event == "error")
        if chunk.usage is not None or chunk.x_groq is not None:
            self._usage = parse_usage(chunk.usage) or parse_usage(chunk.x_groq) or self._usage
        if not chunk.choices:
            # After the reason, an empty list of choices comes with the usage and with nothing more to follow.
            return self._finish() if chunk.usage and self._reason is not None else ()
        told: list[Delta] = []
        for choice in chunk.choices:
            if not choice.index:  # others are other answers to the same question
                told += self._read_choice(choice)
        return told if self._served_model is None else self._introduce(self._served_model, chunk, told)

    def _introduce(self, served_model: ServedModel, chunk: Chunk, told: Sequence[Delta]) -> Sequence[Delta]:
        served_model.observe(chunk.model)
        if not told:
            return told
        self._served_model = None
        return served_model.announce(told)

    def end(self) -> Sequence[Delta]:
        if self._reason is None or self._calls.are_torn():
            raise make_broken_stream_error()
        return self._finish()

    def _decode(self, data: bytes, *, named_error: bool) -> Chunk:
        try:
            chunk = decode_chunk(data)
            if not named_error and not chunk.is_error():
                return chunk
        except _UNREADABLE:
            if not named_error and not is_error_payload(decode_json_or_text(data)):
                raise UpstreamError("The model's server sent what is no chunk of a chat completion.") from None
        raise map_error_payload(decode_json_or_text(data), secrets=self._secrets)

    # What is said

    def _read_choice(self, choice: Choice) -> Sequence[Delta]:
        said = choice.delta
        if self._speech.is_flowing and choice.is_plain() and said is not None and said.is_plain():
            # Most of all chunks: the next word, and nothing else.
            assert isinstance(said.content, str)
            self._said.append(said.content)
            return (Text(said.content),)
        if choice.error:
            raise map_error_payload({"error": choice.error}, secrets=self._secrets)
        whole, ending = choice.message, choice.finish_reason
        if whole is not None and not self._said:
            said, whole = whole, None
            ending = ending or "stop"
        told: list[Delta] = []
        if said is not None:
            probable = choice.logprobs.get("content") if isinstance(choice.logprobs, dict) else None
            told += self._noted(self._read_said(said, parse_logprobs(probable)))
        if whole is not None and (said is None or choice.finish_reason):
            told += self._noted(self._catch_up(whole))
        if ending:
            self._reason = read_ending(ending)
            if self._reason is None:
                raise UpstreamError(f"The model's server broke off with the reason '{ending}'.")
            self._calls.settle()
        return told

    def _read_said(self, said: Said, logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        yield from self._read_reasoning(said)
        yield from self._read_words(said, logprobs)
        for piece in said.tool_calls or ():
            if piece is not None:
                yield from self._read_call(piece)
        if said.function_call is not None:
            yield from self._read_call(CallPiece(-1, function=said.function_call))

    def _read_words(self, said: Said, logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        if said.content:
            for delta in self._read_content(said.content, logprobs):
                yield from self._hand_over(delta)
        if said.refusal and isinstance(said.refusal, str):
            yield from self._hand_over(Refusal(said.refusal))
        for told in _list(said.annotations):
            annotation = read_annotation(told)
            if annotation is not None:
                yield from self._hand_over(Annotate(annotation))

    def _catch_up(self, said: Said) -> Iterator[Delta]:
        """All of the answer, after pieces of it: some servers repeat it at the end, and some put calls only there."""
        if not self._has_spoken:
            yield from self._read_words(said, ())
        pieces = [piece for piece in said.tool_calls or () if piece is not None]
        if said.function_call is not None:
            pieces.append(CallPiece(function=said.function_call))
        for told in self._calls.catch_up(pieces):
            yield from self._turn_to(told)

    def _hand_over(self, delta: Delta) -> Iterator[Delta]:
        """A delta that ends the reasoning: what is kept for the server goes with that, before it."""
        if (self._kept.details or self._kept.calls) and not isinstance(delta, Reasoning):
            yield self._seal()
        yield delta

    def _seal(self) -> ReasoningSeal:
        kept, self._kept = self._kept, OpaqueState()
        return ReasoningSeal(kept.write())

    def _read_reasoning(self, said: Said) -> Iterator[Delta]:
        details = [each for each in _list(said.reasoning_details) if isinstance(each, dict)]
        if self._quirks.reasoning_field == "reasoning_details":
            for detail in details:
                self._kept.add_detail(detail)
        told = list(_read_details(details))
        if not told:
            text = said.reasoning_content or said.reasoning  # some send it under both names
            told = [Reasoning(text)] if isinstance(text, str) and text else []
        if told:
            self._speech.pause()
        yield from told

    def _read_content(self, content: str | list[Any], logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        if isinstance(content, str):
            yield from self._speech.write(content, logprobs)
            return
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "thinking":
                self._speech.pause()
                yield Reasoning(_join_texts(part.get("thinking")))
            elif text := _join_texts([part]):
                yield from self._speech.write(text, ())

    def _read_call(self, piece: CallPiece) -> Iterator[Delta]:
        told = self._calls.read(piece)
        if self._quirks.keep_call_extras and piece.extra_content is not None:
            call_id = self._calls.find_id(piece)
            if call_id is not None:
                self._kept.calls[call_id] = piece.extra_content
        if told is not None:
            yield from self._turn_to(told)

    def _turn_to(self, call: ToolCall) -> Iterator[Delta]:
        yield from self._speech.flush()
        self._speech.pause()
        yield from self._hand_over(call)

    def _noted(self, told: Iterable[Delta]) -> Iterator[Delta]:
        """Remember what is said, for an estimate of its length."""
        for delta in told:
            if isinstance(delta, ToolCall):
                self._said.append(delta.name + delta.arguments)
            elif isinstance(delta, Text | Reasoning | ReasoningSummary | Refusal):
                self._said.append(delta.text)
                self._has_spoken = self._has_spoken or isinstance(delta, Text | Refusal)
            yield delta

    # The end

    def _finish(self) -> Sequence[Delta]:
        if self._reason is None and not self._said:
            raise UpstreamError("The model's server ended the answer without having said anything.")
        told: list[Delta] = [*self._speech.close(alone=not self._said)]
        if self._reason in (None, "stop"):
            told += self._calls.fill_empty()
        if self._kept.details or self._kept.calls:
            told.append(self._seal())
        self.finished = True
        usage = self._usage or self._estimate("".join(self._said))
        return [*told, TokenUsage(usage), Finish(self._reason or "stop")]


def _read_details(details: Sequence[Mapping[str, Any]]) -> Iterator[Delta]:
    for detail in details:
        text, summary = detail.get("text"), detail.get("summary")
        if detail.get("type") == "reasoning.text" and isinstance(text, str) and text:
            yield Reasoning(text)
        elif detail.get("type") == "reasoning.summary" and isinstance(summary, str) and summary:
            index = detail.get("index")
            yield ReasoningSummary(summary, index if isinstance(index, int) else 0)


def _join_texts(told: Any) -> str:
    """The text of a part: a string, or parts of its own."""
    if isinstance(told, list):
        return "".join(_join_texts(each.get("text") if isinstance(each, Mapping) else each) for each in told)
    return told if isinstance(told, str) else ""


def _list(told: Any) -> list[Any]:
    return told if isinstance(told, list) else []
