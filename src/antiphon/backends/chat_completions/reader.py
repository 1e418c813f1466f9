"""Translation of a Chat Completions stream to deltas.

An answer ends with `[DONE]`, or with the end of the stream after a `finish_reason`. The chunk with the reason is not
the last: the usage follows it, and some servers send several calls, each with a reason. A reason therefore does not
cover a call that follows it: if the stream ends within that call, it is broken.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.text import TextStream
from antiphon.backends.chat_completions.tool_calls import ToolCallAssembler
from antiphon.backends.chat_completions.wire import (
    NO_FRAME,
    ChatChunk,
    Choice,
    FinishReason,
    MessageDelta,
    OpaqueState,
    TextFrame,
    ToolCallDelta,
    announces_calls,
    decode_chunk,
    decode_damaged_chunk,
    decode_plain_answer,
    decode_plain_chunk,
    decode_start_chunk,
    decode_text,
    find_text_frame,
    is_finish_reason,
    number_calls,
    number_parts,
    parse_finish_reason,
    parse_image,
)
from antiphon.errors import UpstreamError
from antiphon.protocol.content import LogProb
from antiphon.protocol.json_text import JSON_ERRORS
from antiphon.protocol.response import Usage
from antiphon.protocol.tools import Tools
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
    WholeItem,
)
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.sse import SseMessage
from antiphon.upstream.delta_stream import PlainAnswerReader
from antiphon.upstream.error_mapping import (
    decode_json_or_text,
    describe_value,
    is_error_payload,
    make_broken_stream_error,
    map_error_payload,
)
from antiphon.upstream.fields import ServedModel, parse_annotation, parse_logprobs, read_list
from antiphon.upstream.usage import parse_usage

_DEFAULT_LIMITS = AnswerLimits()
# The number of texts after which the search for their frame pays off.
_SHORT_ANSWER = 3


class ChatReader(PlainAnswerReader):
    """Reads one answer.

    `estimate` returns the usage for the answer's text if the server sends none. `secrets` must not appear in errors.
    `served_model` observes the model's name. An answer has at most as many calls as `limits` permit output items.
    `is_whole` is True if the answer probably comes in one piece. `tools` are those of the request.
    """

    def __init__(
        self,
        quirks: Quirks,
        *,
        estimate: Callable[[str], Usage],
        secrets: Collection[str] = (),
        served_model: ServedModel | None = None,
        limits: AnswerLimits = _DEFAULT_LIMITS,
        is_whole: bool = False,
        tools: Tools | None = None,
    ) -> None:
        self.finished = False
        self._served_model = served_model
        self._quirks = quirks
        self._estimate = estimate
        self._secrets = secrets
        self._limits = limits
        self._tools = tools
        self._usage: Usage | None = None
        self._reason: FinishReason | None = None
        self._expects_calls = False
        self._has_text = self._has_images = False
        self._expects_text = False  # the next chunks probably add text and nothing else
        self._frame: TextFrame | None = None  # of the chunks of this answer; None: not known yet
        self._expects_answer = is_whole and not quirks.thinking_open
        self._expects_start = not is_whole and not quirks.thinking_open  # of an answer that is text
        if not self._expects_answer:
            self._prepare()

    def _prepare(self) -> None:
        """Create the parts that read an answer piece by piece."""
        self._text = TextStream(tags=self._quirks.thinking_tags, thinking=self._quirks.thinking_open)
        self._calls = ToolCallAssembler(self._limits, self._tools)
        self._state = OpaqueState()
        self._written: list[str] = []

    @property
    def is_complete(self) -> bool:
        """True after a finish reason, unless there are calls: more of them may follow, each with a reason."""
        return self._reason is not None and not self._calls

    def read(self, message: SseMessage) -> Sequence[Delta]:
        if message.event is None:
            texts, count = self.read_texts((message.data,))
            if count:
                return texts
        if self._expects_answer:
            self._expects_answer = False
            self._prepare()
        had_text = self._has_text
        self._expects_start = self._expects_text = False  # a message with a name may end the text
        deltas = self._read(message)
        if not had_text and self._has_text:
            self._expects_text = self._text.is_plain_text
        return deltas

    def read_texts(self, data: Sequence[bytes]) -> tuple[list[Delta], int]:
        deltas: list[Delta] = []
        count = 0
        while self._expects_start and count < len(data):
            started = self._read_start(data[count])
            if started is None:
                break
            deltas += started
            count += 1
        if not self._expects_text:
            return deltas, count
        # Local names, because this loop runs for every token.
        decode, text_delta, written = decode_plain_chunk, Text, self._written
        prefix, suffix = self._frame or NO_FRAME
        start, end = len(prefix) - 1, 1 - len(suffix)
        try:
            for each in data[count:] if count else data:
                text = ""
                if each.startswith(prefix) and each.endswith(suffix):
                    text = decode_text(each[start:end])
                if not text:
                    chunk = decode(each)
                    if chunk.usage is not None:
                        self._usage = parse_usage(chunk.usage) or self._usage
                    text = chunk.choices[0].delta.content
                    if self._frame is None and len(written) > _SHORT_ANSWER:
                        self._frame = prefix, suffix = find_text_frame(each, text)
                        start, end = len(prefix) - 1, 1 - len(suffix)
                written.append(text)
                deltas.append(text_delta(text))
                count += 1
        except JSON_ERRORS:
            self._expects_text = False  # for the rest of the answer: decoding twice costs more than it saves
        return deltas, count

    def _read_start(self, data: bytes) -> Sequence[Delta] | None:
        """Return the deltas of a first chunk, until the text begins. None: another method must read the chunk."""
        try:
            chunk = decode_start_chunk(data)
        except JSON_ERRORS:
            self._expects_start = False
            return None
        text = chunk.choices[0].delta.content
        if text and not self._text.begin(text):
            self._expects_start = False
            return None
        if chunk.usage is not None:
            self._usage = parse_usage(chunk.usage) or self._usage
        deltas: Sequence[Delta] = ()
        if text:
            self._expects_start, self._expects_text, self._has_text = False, True, True
            self._written.append(text)
            deltas = (Text(text),)
        return deltas if self._served_model is None else self._announce(self._served_model, chunk, deltas)

    def read_plain_answer(self, body: bytes) -> Sequence[Delta]:
        if not self._expects_answer:
            return ()
        try:
            answer = decode_plain_answer(body)
        except JSON_ERRORS:
            return ()
        text = answer.choices[0].message.content
        visible = text.lstrip()
        if not visible or visible[0] == "<":  # it may be the tag of reasoning
            return ()
        self.finished = True
        usage = parse_usage(answer.usage) or self._estimate(text)
        deltas: list[Delta] = [Text(text), TokenUsage(usage), Finish()]
        return deltas if self._served_model is None else self._announce(self._served_model, answer, deltas)

    def _read(self, message: SseMessage) -> Sequence[Delta]:
        data = message.data
        if not data.startswith(b"{"):
            data = data.strip()
            if data in (b"", b"[DONE]"):
                return self._finish() if data else ()
        chunk = self._decode(data, named_error=message.event == "error")
        if chunk.usage is not None or chunk.x_groq is not None:
            self._usage = parse_usage(chunk.usage) or parse_usage(chunk.x_groq) or self._usage
        if not chunk.choices:
            # After the reason, a chunk without choices but with the usage is the last.
            return self._finish() if chunk.usage and self._reason is not None else ()
        deltas: list[Delta] = []
        for choice in read_list(chunk.choices):
            if not choice.index:  # other indexes are alternative answers
                deltas += self._read_choice(choice)
        return deltas if self._served_model is None else self._announce(self._served_model, chunk, deltas)

    def _announce(self, served_model: ServedModel, chunk: ChatChunk, deltas: Sequence[Delta]) -> Sequence[Delta]:
        served_model.observe(chunk.model)
        if not deltas:
            return deltas
        self._served_model = None
        return served_model.announce(deltas)

    def end(self) -> Sequence[Delta]:
        if self._reason is None or self._calls.has_incomplete():
            raise make_broken_stream_error()
        return self._finish()

    def _decode(self, data: bytes, *, named_error: bool) -> ChatChunk:
        if not named_error:
            chunk: ChatChunk | None
            try:
                chunk = decode_chunk(data)
            except JSON_ERRORS:
                chunk = None if is_error_payload(decode_json_or_text(data)) else self._decode_damaged(data)
            if chunk is not None and not chunk.is_error():
                return chunk
        raise map_error_payload(decode_json_or_text(data), secrets=self._secrets)

    def _decode_damaged(self, data: bytes) -> ChatChunk:
        try:
            return decode_damaged_chunk(data)
        except (ValueError, *JSON_ERRORS):
            if self.is_complete:  # data after the end of an answer, such as another end marker
                return ChatChunk()
            raise UpstreamError("The upstream sent data that is not a Chat Completions chunk.") from None

    # Content

    def _read_choice(self, choice: Choice) -> Sequence[Delta]:
        if choice.error:
            raise map_error_payload({"error": choice.error}, secrets=self._secrets)
        if choice.usage is not None:  # Moonshot sends it here
            self._usage = parse_usage(choice.usage) or self._usage
        message_delta, full, finish_reason = choice.delta, choice.message, choice.finish_reason
        deltas: list[Delta] = [] if full is None else self._emit_calls(self._calls.release_name())
        if full is not None and not self._written:
            message_delta, full = full, None
            finish_reason = finish_reason or "stop"
            number_calls(message_delta)
        if message_delta is not None:
            tokens = choice.logprobs.get("content") if isinstance(choice.logprobs, dict) else None
            deltas += self._record(self._read_message(message_delta, parse_logprobs(tokens)))
        if full is not None and (message_delta is None or choice.finish_reason):
            deltas += self._record(self._add_missing(full))
        if finish_reason and is_finish_reason(finish_reason):
            self._set_reason(finish_reason)
            deltas += self._emit_calls(self._calls.release())
        return deltas

    def _set_reason(self, word: str) -> None:
        self._reason = parse_finish_reason(word)
        if self._reason is None:
            raise UpstreamError(f"The upstream failed with the finish reason '{describe_value(word, self._secrets)}'.")
        self._expects_calls = announces_calls(word)
        self._calls.settle()

    def _read_message(self, message: MessageDelta, logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        yield from self._read_reasoning(message)
        yield from self._read_text(message, logprobs)
        parts = read_list(message.tool_calls)
        if len(parts) > 1:
            number_parts(parts)
        for part in parts:
            if part is not None:
                yield from self._read_call(part)
        if message.function_call is not None:
            yield from self._read_call(ToolCallDelta(-1, function=message.function_call))

    def _read_text(self, message: MessageDelta, logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        if message.content:
            for delta in self._split_content(message.content, logprobs):
                yield from self._emit(delta)
        if message.refusal and isinstance(message.refusal, str):
            yield from self._emit(Refusal(message.refusal))
        for payload in read_list(message.annotations):
            annotation = parse_annotation(payload)
            if annotation is not None:
                yield from self._emit(Annotate(annotation))
        for payload in read_list(message.images):
            yield from self._read_image(payload)

    def _read_image(self, payload: Any) -> Iterator[Delta]:
        """Yield a generated image as an item. The address of one that is not sent itself is text."""
        image = parse_image(payload)
        if isinstance(image, str):
            for delta in self._text.write(image, ()):
                yield from self._emit(delta)
        elif image is not None:
            self._has_images = True
            yield from self._emit_item(WholeItem(image))

    def _add_missing(self, message: MessageDelta) -> Iterator[Delta]:
        """Yield the deltas that the whole message adds: some servers repeat it at the end, or send calls only there."""
        had_images = self._has_images
        if not self._has_text:
            for delta in self._read_text(message, ()):
                if not had_images or not isinstance(delta, WholeItem):
                    yield delta
        elif not had_images:
            for payload in read_list(message.images):
                yield from self._read_image(payload)
        parts = [part for part in read_list(message.tool_calls) if part is not None]
        if message.function_call is not None:
            parts.append(ToolCallDelta(function=message.function_call))
        for call in self._calls.add_missing(parts):
            yield from self._emit_item(call)

    def _emit(self, delta: Delta) -> Iterator[Delta]:
        """Emit a delta. If it ends the reasoning, the opaque state is emitted before it."""
        if (self._state.details or self._state.calls) and not isinstance(delta, Reasoning):
            yield self._seal()
        yield delta

    def _seal(self) -> ReasoningSeal:
        state, self._state = self._state, OpaqueState()
        return ReasoningSeal(state.encode())

    def _read_reasoning(self, message: MessageDelta) -> Iterator[Delta]:
        details = [detail for detail in read_list(message.reasoning_details) if isinstance(detail, dict)]
        if self._quirks.reasoning_field == "reasoning_details":
            for detail in details:
                self._state.add_detail(detail)
        deltas = list(_parse_details(details))
        if not deltas:
            # Some servers send two of them, with the same text.
            field = message.reasoning_content or message.reasoning or message.reasoning_text or message.thinking
            text = _join_texts(field)
            deltas = [Reasoning(text)] if text else []
        if deltas:
            self._text.pause()
        yield from deltas

    def _split_content(self, content: str | list[Any], logprobs: tuple[LogProb, ...]) -> Iterator[Delta]:
        if isinstance(content, str):
            yield from self._text.write(content, logprobs)
            return
        for part in read_list(content):
            if isinstance(part, Mapping) and part.get("type") == "thinking":
                self._text.pause()
                yield Reasoning(_join_texts(part.get("thinking")))
            elif isinstance(part, Mapping) and part.get("type") == "image_url":
                yield from self._read_image(part)
            elif text := _join_texts([part]):
                yield from self._text.write(text, ())

    def _read_call(self, part: ToolCallDelta) -> Iterator[Delta]:
        deltas = self._calls.read(part)
        if self._quirks.keep_call_extras and part.extra_content is not None:
            call_id = self._calls.find_id(part)
            if call_id is not None:
                self._state.calls[call_id] = part.extra_content
        for delta in deltas:
            yield from self._emit_item(delta)

    def _emit_calls(self, calls: Sequence[ToolCall]) -> list[Delta]:
        return [delta for call in calls for delta in self._record(self._emit_item(call))]

    def _emit_item(self, delta: ToolCall | WholeItem) -> Iterator[Delta]:
        """Emit a delta that ends the open text."""
        yield from self._text.flush()
        self._text.pause()
        yield from self._emit(delta)

    def _record(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Record the text of the deltas for the usage estimate."""
        for delta in deltas:
            if isinstance(delta, ToolCall):
                self._written.append(delta.name + delta.arguments)
            elif isinstance(delta, Text | Reasoning | ReasoningSummary | Refusal):
                self._written.append(delta.text)
                self._has_text = self._has_text or isinstance(delta, Text | Refusal)
            elif isinstance(delta, WholeItem):
                self._written.append("")  # the answer is not empty
            yield delta

    # End

    def _finish(self) -> Sequence[Delta]:
        released = self._emit_calls(self._calls.release())
        if self._reason is None and not self._written:
            raise UpstreamError("The upstream ended the answer without any content.")
        if self._expects_calls and not self._written:
            raise UpstreamError("The upstream announced tool calls but sent none.")
        deltas = [*released, *self._text.close(alone=not self._written)]
        if self._reason in (None, "stop"):
            deltas += self._calls.fill_empty()
        if self._state.details or self._state.calls:
            deltas.append(self._seal())
        self.finished = True
        usage = self._usage or self._estimate("".join(self._written))
        return [*deltas, TokenUsage(usage), Finish(self._reason or "stop")]


def _parse_details(details: Sequence[Mapping[str, Any]]) -> Iterator[Delta]:
    for detail in details:
        text, summary = detail.get("text"), detail.get("summary")
        if detail.get("type") == "reasoning.text" and isinstance(text, str) and text:
            yield Reasoning(text)
        elif detail.get("type") == "reasoning.summary" and isinstance(summary, str) and summary:
            index = detail.get("index")
            yield ReasoningSummary(summary, index if isinstance(index, int) else 0)


def _join_texts(payload: Any) -> str:
    """Return the text of a part: a string, or a list of parts."""
    if isinstance(payload, list):
        parts = read_list(payload)
        return "".join(_join_texts(part.get("text") if isinstance(part, Mapping) else part) for part in parts)
    return payload if isinstance(payload, str) else ""
