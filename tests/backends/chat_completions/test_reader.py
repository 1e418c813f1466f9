"""Malformed and unusual chunks: they are read, or fail with a clear error."""

import json
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol.response import Usage
from antiphon.protocol.tools import FunctionTool
from antiphon.stream.deltas import Delta, Finish, Reasoning, Served, Text, TokenUsage, ToolCall
from antiphon.stream.sse import SseMessage
from antiphon.upstream.fields import ServedModel
from support.damage import read_objects, replay_damaged
from support.replay import replay

CORPUS = Path(__file__).parents[2] / "wire" / "chat"
STATEFUL = Quirks(keep_call_extras=True, reasoning_field="reasoning_details")


def make_reader() -> ChatReader:
    return ChatReader(STATEFUL, estimate=lambda _: Usage(0, 0, 0))


CHUNKS = read_objects(CORPUS)


@given(st.data())
def test_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(CHUNKS, make_reader, data)) == 1


DEEP = b'{"error":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


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


NO_TEXT = b'{"choices":[{"delta":{"content":"\xff"}}]}'


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"null", b"7", b'"text"', b"[]", b'{"choices": 7}', b"{", b"[DONE", NO_TEXT, DEEP],
    ids=lambda data: repr(data[:20]),
)
def test_invalid_chunk_is_an_error(data: bytes) -> None:
    with pytest.raises(UpstreamError):
        make_reader().read(SseMessage(None, data))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"type":"ping"}', b'{"choices":null}', b'{"choices":[{}]}'])
def test_keepalive_yields_no_delta(data: bytes) -> None:
    assert list(make_reader().read(SseMessage(None, data))) == []


@pytest.mark.parametrize(
    "delta",
    [
        {"content": ["a"]},
        {"content": [{"type": "text", "text": "a"}, None]},
        {"content": "a", "tool_calls": [None]},
        {"content": "a", "refusal": {}, "annotations": {}, "reasoning_details": "b"},
    ],
)
def test_text_arrives_despite_malformed_fields(delta: Any) -> None:
    deltas = make_reader().read(SseMessage(None, json.dumps({"choices": [{"delta": delta}]}).encode()))
    assert list(deltas) == [Text("a")]


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":[null,{"delta":{"content":"a\tb"}}]}',
        b'{"choices":[{"index":"0","delta":{"content":"a\\tb"}}]}',
        b'{"choices":[{"delta":{"content":"a\\tb"},"logprobs":{"content":[{"token":"a","logprob":NaN}]}}]}',
        b'{"choices":[{"delta":{"content":"a\\tb"}}],"usage":{"prompt_tokens":-Infinity}}',
    ],
    ids=["control character", "number in a string", "NaN", "infinity"],
)
def test_damaged_chunk_is_read(chunk: bytes) -> None:
    assert [delta.text for delta in make_reader().read(SseMessage(None, chunk)) if isinstance(delta, Text)] == ["a\tb"]


@pytest.mark.parametrize("field", ["delta", "message"])
@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_damaged_arguments_of_a_call_are_refused(field: str, name: str) -> None:
    call = b'{"name":"pay","arguments":{"sum":NaN}}'
    calls = b'[{"id":"c","function":' + call + b"}]" if name == "tool_calls" else call
    chunk = b'{"choices":[{"%b":{"%b":%b}}]}' % (field.encode(), name.encode(), calls)
    with pytest.raises(UpstreamError, match="not a Chat Completions chunk"):
        list(make_reader().read(SseMessage(None, chunk)))


def test_damaged_chunk_with_error_is_error() -> None:
    with pytest.raises(UpstreamError, match="memory"):
        make_reader().read(SseMessage(None, b'{"error":{"message":"out\tof memory"},"choices":[]}'))


@pytest.mark.parametrize("marker", [b"[done]", b'"[DONE]"', b"done"])
def test_unreadable_data_after_finish_reason_is_ignored(marker: bytes) -> None:
    raw = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: ' + marker + b"\n\n"
    assert replay(make_reader, [raw])[-1]["type"] == "response.completed"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_text", "thinking"])
@pytest.mark.parametrize("value", ["why", [{"type": "text", "text": "why"}]])
def test_reasoning_is_read_from_every_known_field(name: str, value: Any) -> None:
    [delta] = make_reader().read(SseMessage(None, json.dumps({"choices": [{"delta": {name: value}}]}).encode()))
    assert delta == Reasoning("why")


def test_parts_without_index_and_id_belong_to_calls_by_position() -> None:
    first = [{"function": {"name": "f", "arguments": '{"n":'}}] * 2
    second = [{"function": {"arguments": f"{number}}}"}} for number in range(2)]
    reader, deltas = make_reader(), list[Delta]()
    for calls in (first, second):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": calls}}]}).encode()))
    assert deltas == [
        ToolCall(0, '{"n":', "f"),
        ToolCall(1, '{"n":', "f"),
        ToolCall(0, "0}"),
        ToolCall(1, "1}"),
    ]


def part(name: str = "", arguments: str = "", **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | fields


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [part("get_", id="a", index=0), part("wea", index=0), part("ther", index=0), part("", "{}", index=0)],
            [ToolCall(0, "", "get_weather", "a"), ToolCall(0, "{}", "", "a")],
        ),
        (
            [part("get_", id="a", index=0), part("weather", '{"n":', id="a", index=0), part("", "1}", index=0)],
            [ToolCall(0, '{"n":', "get_weather", "a"), ToolCall(0, "1}", "", "a")],
        ),
        ([part("get_"), part("weather"), part("", "{}")], [ToolCall(0, "", "get_weather"), ToolCall(0, "{}")]),
        # The name of one tool begins with another's.
        ([part("get", id="a"), part("get", "{}", id="a")], [ToolCall(0, "{}", "get", "a")]),
        ([part("get", id="a"), part("_weather", "{}")], [ToolCall(0, "{}", "get_weather", "a")]),
        # The answer, or another call, ends the name.
        ([part("get", id="a")], [ToolCall(0, "", "get", "a"), ToolCall(0, "{}")]),
        (
            [part("get", id="a", index=0), part("pay", "{}", id="b", index=1)],
            [ToolCall(0, "", "get", "a"), ToolCall(1, "{}", "pay", "b"), ToolCall(0, "{}")],
        ),
        # An unknown name does not wait.
        ([part("other", id="a")], [ToolCall(0, "", "other", "a"), ToolCall(0, "{}")]),
    ],
)
def test_name_of_a_call_may_come_in_parts(parts: list[dict[str, Any]], expected: list[Any]) -> None:
    tools = [FunctionTool(name) for name in ("pay", "get_weather", "get")]
    reader, deltas = ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), tools=tools), list[Delta]()
    for each in parts:
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [each]}}]}).encode()))
    deltas += reader.read(SseMessage(None, b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}'))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert deltas == [*expected, TokenUsage(Usage(0, 0, 0)), Finish()]


@pytest.mark.parametrize("delta", [{"content": "a"}, {"tool_calls": [part("get", index=0)]}])
def test_call_in_the_whole_message_has_its_name_and_is_not_repeated(delta: dict[str, Any]) -> None:
    tools = [FunctionTool(name) for name in ("get", "get_weather")]
    reader, deltas = ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), tools=tools), list[Delta]()
    whole = {"tool_calls": [part("get", id="a"), part("get_weather", id="b")]}
    for choice in ({"delta": delta}, {"message": whole, "finish_reason": "tool_calls"}):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [choice]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    calls = [each for each in deltas if isinstance(each, ToolCall)]
    assert [(each.key, each.name) for each in calls if each.name] == [(0, "get"), (1, "get_weather")]
    assert [each for each in calls if not each.name] == [ToolCall(0, "{}"), ToolCall(1, "{}")]


def test_plain_text_error_event_is_raised() -> None:
    with pytest.raises(AntiphonError) as caught:
        make_reader().read(SseMessage("error", b"out of memory"))
    assert caught.value.message == "The upstream failed: out of memory"


def test_call_extra_content_is_stored_at_any_position() -> None:
    """Gemini sends a signature with its call, or in a piece of its own after it."""
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    late = {"index": 0, "extra_content": {"google": {"thought_signature": "s"}}}
    deltas: list[Delta] = []
    for piece in (call, late):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert [type(delta).__name__ for delta in deltas] == ["ToolCall", "ReasoningSeal", "TokenUsage", "Finish"]


def test_text_after_a_call_is_a_new_message() -> None:
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    pieces: list[Any] = [
        {"content": "<"},
        {"tool_calls": [call]},
        {"content": "\n"},
        {"content": "b"},
        {"reasoning": "c"},
    ]
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": piece}]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    usage = TokenUsage(Usage(0, 0, 0))
    assert deltas == [Text("<"), ToolCall(0, "{}", "f", "a"), Text("\nb"), Reasoning("c"), usage, Finish("stop")]
    assert reader.finished


def test_long_call_in_small_parts_takes_linear_time() -> None:
    reader = make_reader()
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"text":"'}}
    reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [first]}}]}).encode()))
    piece = SseMessage(None, b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"abcd"}}]}}]}')
    begun = time.process_time()
    for _ in range(200_000):
        reader.read(piece)
    assert time.process_time() - begun < 8


def test_finish_reason_completes_an_answer_without_calls() -> None:
    content = {"content": "a"}
    call = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    is_complete = []
    for delta in (content, call):
        for reason in (None, "stop"):
            reader = make_reader()
            chunk = {"choices": [{"delta": delta, "finish_reason": reason}]}
            reader.read(SseMessage(None, json.dumps(chunk).encode()))
            is_complete.append(reader.is_complete)
    assert is_complete == [False, True, False, False]


def make_call(call_id: str, arguments: str, reason: str | None = None) -> bytes:
    call = {"index": ord(call_id), "id": call_id, "function": {"name": "f", "arguments": arguments}}
    choice = {"delta": {"tool_calls": [call]}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chunks", "status", "calls"),
    [
        ([make_call("b", '{"x":')], "failed", ["completed", "incomplete"]),
        ([make_call("b", "")], "failed", ["completed", "incomplete"]),
        ([make_call("b", '{"x":'), make_call("c", "{}")], "failed", ["completed", "incomplete", "incomplete"]),
        ([make_call("b", '{"x":'), b"data: [DONE]\n\n"], "completed", ["completed", "completed"]),
        ([make_call("b", '{"x":', "stop")], "completed", ["completed", "completed"]),
        ([make_call("b", '{"x":', "length")], "incomplete", ["completed", "incomplete"]),
        ([make_call("b", "{}")], "completed", ["completed", "completed"]),
        ([make_call("a", "")], "completed", ["completed"]),
    ],
)
def test_stream_closed_within_a_later_call_is_broken(chunks: list[bytes], status: str, calls: list[str]) -> None:
    """Invalid arguments alone do not break the stream: the server then sends another reason, or the end."""
    response = replay(make_reader, [make_call("a", "{}", "tool_calls"), *chunks])[-1]["response"]
    assert (response["status"], [item["status"] for item in response["output"]]) == (status, calls)


def test_deeply_nested_arguments_are_passed_unchanged() -> None:
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    reader = make_reader()
    deltas: list[Delta] = []
    for piece in ({"name": "f", "arguments": deep}, {"name": "f", "arguments": " "}):
        chunk = {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", "function": piece}]}}]}
        deltas += reader.read(SseMessage(None, json.dumps(chunk).encode()))
    assert deltas == [ToolCall(0, deep, "f", "a"), ToolCall(0, " ", "", "a")]
