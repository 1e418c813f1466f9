"""Assembly of tool calls from their parts, as the reader yields them."""

import json
import time
from typing import Any

import pytest

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.protocol.response import Usage
from antiphon.protocol.tools import FunctionTool
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage, ToolCall
from antiphon.stream.sse import SseMessage
from support.chat_reader import make_reader
from support.replay import replay


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
        ([part("get", id="a"), part("get", "{}", id="a")], [ToolCall(0, "", "get", "a"), ToolCall(0, "{}", "", "a")]),
        (
            [part("get", id="a"), part("_weather", "{}")],
            [ToolCall(0, "", "get_weather", "a"), ToolCall(0, "{}", "", "a")],
        ),
        # The answer, or another call, ends the name.
        ([part("get", id="a")], [ToolCall(0, "", "get", "a"), ToolCall(0, "{}")]),
        (
            [part("get", id="a", index=0), part("pay", "{}", id="b", index=1)],
            [
                ToolCall(0, "", "get", "a"),
                ToolCall(1, "", "pay", "b"),
                ToolCall(1, "{}", "", "b"),
                ToolCall(0, "{}"),
            ],
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


EMPTY_PARTS = [
    {},
    {"index": 0, "function": None},
    {"index": 0, "id": "", "type": None, "function": {}},
    {"index": 1, "id": "", "type": None, "function": {"name": "", "arguments": ""}},
    {"id": None, "function": {"name": None, "arguments": None}},
]


@pytest.mark.parametrize("empty", EMPTY_PARTS)
def test_part_without_content_starts_no_call(empty: dict[str, Any]) -> None:
    """Some servers send one with each chunk of text."""
    reader, deltas = make_reader(), list[Delta]()
    for choice in (
        {"delta": {"content": "a", "tool_calls": [empty]}},
        {"delta": {"content": "b", "tool_calls": [empty, empty], "function_call": {"name": "", "arguments": ""}}},
        {"delta": {"tool_calls": [empty]}, "finish_reason": "stop"},
        {"message": {"content": "ab", "tool_calls": [empty]}, "finish_reason": "stop"},
    ):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [choice]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert deltas == [Text("a"), Text("b"), TokenUsage(Usage(0, 0, 0)), Finish()]


@pytest.mark.parametrize("empty", EMPTY_PARTS)
def test_part_without_content_does_not_end_a_call(empty: dict[str, Any]) -> None:
    reader, deltas = make_reader(), list[Delta]()
    first = part("f", '{"n":', index=0, id="a")
    for piece in (empty, first, empty, part("", "1}", index=0), empty):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode()))
    deltas += reader.read(SseMessage(None, b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}'))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert deltas == [ToolCall(0, '{"n":', "f", "a"), ToolCall(0, "1}", "", "a"), TokenUsage(Usage(0, 0, 0)), Finish()]


def test_call_extra_content_is_stored_at_any_position() -> None:
    """Gemini sends a signature with its call, or in a piece of its own after it."""
    reader = make_reader()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    late = {"index": 0, "extra_content": {"google": {"thought_signature": "s"}}}
    deltas: list[Delta] = []
    for piece in (call, late):
        deltas += reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [piece]}}]}).encode()))
    deltas += reader.read(SseMessage(None, b"[DONE]"))
    assert [type(delta).__name__ for delta in deltas] == [
        "ToolCall",
        "ReasoningSeal",
        "ToolCall",
        "TokenUsage",
        "Finish",
    ]


def test_long_call_in_small_parts_takes_linear_time() -> None:
    reader = make_reader()
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"text":"'}}
    reader.read(SseMessage(None, json.dumps({"choices": [{"delta": {"tool_calls": [first]}}]}).encode()))
    piece = SseMessage(None, b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"abcd"}}]}}]}')
    begun = time.process_time()
    for _ in range(200_000):
        reader.read(piece)
    assert time.process_time() - begun < 8


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
