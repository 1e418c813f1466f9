"""Calls whose arguments begin with an empty object, as some servers send before the real ones."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.protocol.response import Usage
from antiphon.protocol.tools import FunctionTool
from antiphon.stream.sse import SseMessage
from support.chat_reader import make_reader
from support.replay import replay

Json = dict[str, Any]
# The text of the server, and the arguments of the call.
ARGUMENTS = {
    '{}{"a":1}': '{"a":1}',
    '{}{"a":{}}': '{"a":{}}',
    ' { } {"a":[]} ': '{"a":[]} ',
    "{}{}": "{}",
    "{}": "{}",
    '{"a":{}}': '{"a":{}}',
    "{}x": "{}x",
    "{ }]": "{ }]",
    "[{}]": "[{}]",
    '"{}{"': '"{}{"',
    "": "{}",
}


def part(arguments: str = "", *, index: int | None = 0, name: str | None = None) -> Json:
    """Return a part of a call. With a name, it is the first one."""
    fields: Json = {"index": index, "function": {"name": name, "arguments": arguments}}
    return fields | ({"id": f"call_{index}"} if name else {})


def chunk(*parts: Json, **choice: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": parts}} | choice]}).encode()


def read_calls(chunks: Sequence[bytes], make: Any = make_reader) -> list[tuple[str, str]]:
    response = replay(make, [*chunks, b"data: [DONE]\n\n"])[-1]["response"]
    assert response["status"] == "completed"
    return [(item["call_id"], item["arguments"]) for item in response["output"]]


def split(text: str, data: st.DataObject) -> list[str]:
    """Split a text at random positions. Fragments may be empty."""
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *edges], [*edges, len(text)], strict=True)]


def remove_space(arguments: str) -> str:
    return arguments.replace(" ", "")


@given(st.sampled_from(sorted(ARGUMENTS)), st.data())
def test_empty_object_before_arguments_is_dropped_however_it_is_split(text: str, data: st.DataObject) -> None:
    first, *rest = split(text, data)
    ((call_id, arguments),) = read_calls([chunk(part(first, name="f")), *(chunk(part(each)) for each in rest)])
    assert (call_id, remove_space(arguments)) == ("call_0", remove_space(ARGUMENTS[text]))


@given(st.lists(st.sampled_from(sorted(ARGUMENTS)), min_size=1, max_size=3), st.data())
def test_empty_objects_of_interleaved_calls_are_dropped(texts: list[str], data: st.DataObject) -> None:
    waiting = [
        [
            part(fragment, index=index, name=None if position else "f")
            for position, fragment in enumerate(split(text, data))
        ]
        for index, text in enumerate(texts)
    ]
    chunks = [chunk(parts.pop(0)) for parts in waiting]
    while any(waiting):
        parts = data.draw(st.sampled_from([each for each in waiting if each]))
        chunks.append(chunk(parts.pop(0)))
    assert [(call_id, remove_space(arguments)) for call_id, arguments in read_calls(chunks)] == [
        (f"call_{index}", remove_space(ARGUMENTS[text])) for index, text in enumerate(texts)
    ]


def test_empty_object_in_a_whole_answer_is_dropped() -> None:
    calls = [part('{}{"a":1}', name="f"), part("{}", index=1, name="f"), part('{}{"a":2}', index=2, name="f")]
    expected = [("call_0", '{"a":1}'), ("call_1", "{}"), ("call_2", '{"a":2}')]
    message = {"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}
    assert read_calls([b"data: %b\n\n" % json.dumps({"choices": [message]}).encode()]) == expected


@pytest.mark.parametrize("streamed", [["{}"], ["{", "}"], ["{}", '{"a":1}'], ["{}{", '"a":1}']])
@pytest.mark.parametrize("whole", ['{"a":1}', '{}{"a":1}'])
def test_whole_message_after_an_empty_object_has_the_arguments(streamed: list[str], whole: str) -> None:
    first, *rest = streamed
    chunks = [chunk(part(first, name="f")), *(chunk(part(each)) for each in rest)]
    message = {"tool_calls": [part(whole, name="f")]}
    assert read_calls([*chunks, chunk(message=message, finish_reason="tool_calls", delta=None)]) == [
        ("call_0", '{"a":1}')
    ]


def test_legacy_function_call_loses_the_empty_object() -> None:
    pieces = [{"name": "f", "arguments": "{}"}, {"arguments": '{"a":'}, {"arguments": "1}"}]
    chunks = [b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"function_call": p}}]}).encode() for p in pieces]
    assert [arguments for _, arguments in read_calls(chunks)] == ['{"a":1}']


@pytest.mark.parametrize("index", [0, None])
@pytest.mark.parametrize("texts", [["{}", '{"a":1}'], ["{", "}", '{"a"', ":1}"], ["{}", "", '{"a":1}']])
def test_parts_that_repeat_id_and_name_belong_to_the_call_of_the_empty_object(
    texts: list[str], index: int | None
) -> None:
    chunks = [chunk(part(text, index=index, name="f")) for text in texts]
    assert [arguments for _, arguments in read_calls(chunks)] == ['{"a":1}']


def list_events(name: str) -> list[tuple[str, int]]:
    """Return the ends and starts of items in the events of two calls, the first one with `{}` as its arguments."""
    tools = [FunctionTool("now"), FunctionTool("get", parameters={"type": "object", "required": ["a"]})]
    events = replay(
        lambda: ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), tools=tools),
        [chunk(part("{}", name=name)), chunk(part('{"a":1}', index=1, name="get")), b"data: [DONE]\n\n"],
    )
    return [(e["type"].rpartition(".")[2], e["output_index"]) for e in events if "output_item" in e["type"]]


def test_call_of_a_tool_without_required_arguments_is_done_before_the_next_call() -> None:
    assert list_events("now") == [("added", 0), ("done", 0), ("added", 1), ("done", 1)]


def test_call_of_a_tool_with_required_arguments_stays_open_for_them() -> None:
    assert list_events("get") == [("added", 0), ("added", 1), ("done", 0), ("done", 1)]


def test_finish_reason_ends_a_held_object() -> None:
    reader = make_reader()
    for each in (part("{}", name="f"), part(" ")):
        reader.read(SseMessage(None, chunk(each).removeprefix(b"data: ")))
    (call,) = reader.read(SseMessage(None, b'{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}'))
    assert getattr(call, "arguments", None) == "{}"


def test_endless_space_after_an_empty_object_takes_linear_time() -> None:
    begun = time.process_time()
    for start in ("{", "{}"):
        reader = make_reader()
        reader.read(SseMessage(None, chunk(part(start, name="f")).removeprefix(b"data: ")))
        piece = SseMessage(None, chunk(part("\n")).removeprefix(b"data: "))
        for _ in range(50_000):
            reader.read(piece)
    assert time.process_time() - begun < 8
