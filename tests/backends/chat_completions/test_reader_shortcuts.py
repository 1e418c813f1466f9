"""Shortcuts for chunks of plain text: they yield the same deltas as the general way."""

import json
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import AntiphonError
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Served, Text
from antiphon.stream.sse import SseMessage
from antiphon.upstream.fields import ServedModel
from support.chat_reader import DEEP, STATEFUL, make_reader


class GeneralReader(ChatReader):
    """A reader without the shortcut for chunks of plain text."""

    read = ChatReader._read


EMPTY = [None, "", [], 0, False, "x", ["x"], [{"text": "x"}], {}]
TEXTS = ["", " ", "\n", "<think>", "\u00fc\U0001f600", None, 7, ["a"], [{"text": "a"}]]
DELTAS = [{}, {"content": "a", "role": "assistant"}, {"reasoning": "a"}, None, 7]
# The values that a field of a plain chunk is replaced by. A path names a field of the chunk, choice or delta.
CHANGES: dict[tuple[str, str], list[Any]] = {
    ("chunk", "choices"): [None, [], [{}], [{"delta": {"content": "a"}}, {"index": 1, "delta": {"content": "b"}}]],
    ("chunk", "usage"): [None, {}, {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}, 7],
    ("chunk", "x_groq"): [None, {}, {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}],
    ("chunk", "object"): [None, "chat.completion.chunk", "error", "", 7],
    **{("chunk", name): EMPTY for name in ("error", "model", "message", "detail", "id")},
    ("choice", "index"): [0, 1, None, "0", False],
    ("choice", "delta"): DELTAS,
    ("choice", "message"): DELTAS,
    ("choice", "finish_reason"): [None, "", "stop", "error", 7],
    ("choice", "logprobs"): [None, {}, {"content": [{"token": "a", "logprob": -1}]}, 7],
    ("choice", "error"): EMPTY,
    ("delta", "content"): TEXTS,
    ("delta", "reasoning_details"): [*EMPTY, [{"type": "reasoning.text", "text": "a"}]],
    ("delta", "tool_calls"): [*EMPTY, [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]],
    ("delta", "function_call"): [*EMPTY, {"name": "f", "arguments": "{}"}],
    ("delta", "annotations"): [*EMPTY, [{"type": "url_citation", "url": "https://example.com"}]],
    **{("delta", name): EMPTY for name in ("role", "reasoning_content", "reasoning", "refusal")},
}


@st.composite
def nearly_plain_chunks(draw: st.DrawFn) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": "plain"}
    choice: dict[str, Any] = {"index": 0, "delta": delta}
    chunk: dict[str, Any] = {"choices": [choice]}
    levels = {"chunk": chunk, "choice": choice, "delta": delta}
    for level, name in draw(st.lists(st.sampled_from(list(CHANGES)), max_size=2)):
        levels[level][name] = draw(st.sampled_from(CHANGES[level, name]))
    return chunk


def read_all(reader: ChatReader, messages: list[SseMessage]) -> list[object]:
    read: list[object] = []
    for message in messages:
        try:
            read += reader.read(message)
        except AntiphonError as error:
            return [*read, type(error), str(error)]
    return read


def read_in_batches(reader: ChatReader, messages: list[SseMessage]) -> list[object]:
    """Return the result of `read_all` if all messages arrive at once."""
    read: list[object] = []
    rest = messages
    while rest:
        texts, count = reader.read_texts([each.data for each in takewhile(lambda each: each.event is None, rest)])
        read += texts
        first, rest = rest[count : count + 1], rest[count + 1 :]
        read += (ended := read_all(reader, first))
        if any(isinstance(each, type) for each in ended):
            break
    return read


def make_messages(*chunks: dict[str, Any]) -> list[SseMessage]:
    """Return the messages of these chunks after some plain text, and the end marker."""
    texts = [{"choices": [{"delta": {"content": text}}]} for text in "abcdefgh"]
    messages = [SseMessage(None, json.dumps(chunk).encode()) for chunk in (*texts, *chunks)]
    return [*messages, SseMessage(None, b"[DONE]")]


ROLE: dict[str, Any] = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def make_start(*chunks: dict[str, Any]) -> list[SseMessage]:
    """Return the messages of an answer that begins with these chunks, and the end marker."""
    last = {"choices": [{"delta": {"content": "z"}}]}
    return [SseMessage(None, json.dumps(chunk).encode()) for chunk in (*chunks, last)] + [SseMessage(None, b"[DONE]")]


def check_shortcut(messages: list[SseMessage]) -> None:
    general = GeneralReader(STATEFUL, estimate=lambda _: Usage(0, 0, 0))
    expected = read_all(general, messages)
    for read in (read_all, read_in_batches):
        reader = make_reader()
        assert read(reader, messages) == expected
        assert (reader.finished, reader.is_complete) == (general.finished, general.is_complete)


@pytest.mark.parametrize(("level", "name"), CHANGES)
def test_text_shortcut_yields_the_same_deltas_for_each_field(level: str, name: str) -> None:
    for value in CHANGES[level, name]:
        delta: dict[str, Any] = {"content": "plain"}
        choice: dict[str, Any] = {"index": 0, "delta": delta}
        chunk: dict[str, Any] = {"choices": [choice]}
        {"chunk": chunk, "choice": choice, "delta": delta}[level][name] = value
        check_shortcut(make_messages(chunk))
        check_shortcut(make_messages(chunk, chunk))
        check_shortcut(make_start(chunk))
        check_shortcut(make_start(ROLE, chunk))
        check_shortcut(make_start(chunk, chunk))


@given(st.lists(nearly_plain_chunks(), max_size=4))
def test_start_shortcut_yields_the_same_deltas(chunks: list[dict[str, Any]]) -> None:
    check_shortcut(make_start(*chunks))


@pytest.mark.parametrize(
    "text", ["a", " ", " a", "\n\na", "<", "<t", "<b>", "<think>", " <think>a", "<think>a</think>b"]
)
@pytest.mark.parametrize("then", ["a", " ", "think>", "hink>b", "</think>c"])
def test_start_shortcut_leaves_possible_tags_and_blanks_to_the_splitter(text: str, then: str) -> None:
    texts = [{"choices": [{"delta": {"content": each}}]} for each in (text, then)]
    check_shortcut(make_start(*texts))
    check_shortcut(make_start(ROLE, *texts))
    first, *others = make_start(*texts)
    check_shortcut([SseMessage("message", first.data), *others])


def test_start_shortcut_announces_the_model_with_the_first_text() -> None:
    messages = make_start(ROLE | {"model": "other"}, {"model": "other", "choices": [{"delta": {"content": "a"}}]})
    served = ServedModel("up", "requested")
    reader = ChatReader(STATEFUL, estimate=lambda _: Usage(0, 0, 0), served_model=served)
    assert [list(reader.read(message)) for message in messages[:2]] == [
        [],
        [Served("requested", "up", "other"), Text("a")],
    ]


@given(st.lists(nearly_plain_chunks(), max_size=4))
def test_text_shortcut_yields_the_same_deltas(chunks: list[dict[str, Any]]) -> None:
    check_shortcut(make_messages(*chunks))


@pytest.mark.parametrize("event", ["error", "message", ""])
def test_text_shortcut_respects_the_event_name(event: str) -> None:
    *messages, plain, end = make_messages({"choices": [{"delta": {"content": "plain"}}]})
    check_shortcut([*messages, SseMessage(event, plain.data), end])
    ending = json.dumps({"choices": [{"delta": {"reasoning_content": "r", "content": " "}}]}).encode()
    check_shortcut([*messages, SseMessage(event, ending), plain, end])


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"model":"\xff","choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"a"}}]} ',
        b' {"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"a"}}]',
        b'{"choices":[{"delta":{"content":"a","content":"b"}}]}',
        b'{"choices":[{"delta":{"content":"\\ud83d"}}]}',
        b"[DONE]",
        b"",
        DEEP,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_text_shortcut_reads_malformed_data_the_same_way(data: bytes) -> None:
    *messages, end = make_messages()
    check_shortcut([*messages, SseMessage(None, data), end])


BEGIN = [b"b"] * 8  # enough texts for a search of their frame
FRAME = b'{"choices":[{"delta":{"content":"%b"}}]}'


@pytest.mark.parametrize("space", [b"", b" "])
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'c","content":"d',
        b'c"}},{"delta":{"content":"d',
        b"\\",
        b"\\\\",
        b'\\"',
        b"\\ud83d",
        b"\xc3",
        b"\t",
        b'"}}],"usage":{"total_tokens":1},"x":[{"y":{"z":"',
    ],
)
def test_chunk_in_the_bytes_of_the_one_before_is_read_the_same_way(text: bytes, space: bytes) -> None:
    frame = FRAME.replace(b":", b":" + space)
    messages = [SseMessage(None, frame % each) for each in (*BEGIN, text, b"e")]
    check_shortcut([*messages, SseMessage(None, b"[DONE]")])


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"x":{"content":"a"},"choices":[{"delta":{"content":"%b"}}]}',
        b'{"x":{"content":"%b"},"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"%b"}}],"x":{"content":"a"}}',
        b'{"choices":[{"delta":{"content":"a","content":"%b"}}]}',
        b'{"choices":[{"delta":{"content":"%b","content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"%b"}}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}',
        b'{"choices":[{"delta":{"content" :"%b"}}]}',
    ],
)
def test_text_is_found_beside_other_fields_of_its_name(chunk: bytes) -> None:
    messages = [SseMessage(None, chunk % each) for each in (*BEGIN, b"d", b"a", b"")]
    check_shortcut([*messages, SseMessage(None, b"[DONE]")])


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[{"index":%d,"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"a"},"index":%d}]}',
        b'{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":1,"completion_tokens":%d}}',
    ],
)
def test_other_bytes_around_the_text_are_read(chunk: bytes) -> None:
    # The index 1 is an alternative answer. The last usage counts.
    messages = [SseMessage(None, chunk % number) for number in (*[0] * len(BEGIN), 1, 0)]
    check_shortcut([*messages, SseMessage(None, b"[DONE]")])
