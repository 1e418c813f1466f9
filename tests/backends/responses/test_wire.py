"""Streams of servers that speak Responses, well and badly. Beside each is what it must come to, and in which events."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol import codec
from antiphon.stream.deltas import Finish, Text, TokenUsage, ToolCall
from antiphon.stream.fold import fold
from antiphon.stream.sse import SseMessage
from support.damage import read_objects, replay_damaged
from support.replay import find_harmful_cuts, replay

CORPUS = Path(__file__).parents[2] / "wire" / "responses"
NAMES = sorted(path.stem for path in CORPUS.glob("*.sse"))


def load(name: str) -> bytes:
    return (CORPUS / f"{name}.sse").read_bytes()


def play(name: str) -> list[dict[str, Any]]:
    return replay(ResponsesReader, [load(name)])


def judge(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that a client makes of these events; raises on any that may not come where it comes."""
    # The last event repeats the items, and an item may have more in it than we know: their own events say it all.
    bare = [
        event | {"response": event["response"] | {"output": []}} if "response" in event else event for event in told
    ]
    output: list[dict[str, Any]] = json.loads(
        codec.encode(fold(codec.decode_event(json.dumps(event).encode()) for event in bare).output)
    )
    return output


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_comes_to_what_is_written_beside_it(name: str) -> None:
    expected = json.loads((CORPUS / f"{name}.json").read_text("utf-8"))
    told = play(name)
    response = told[-1]["response"]
    come_to = {field: response[field] for field in ("status", "output", "usage", "error", "incomplete_details")}
    come_to = {field: value for field, value in come_to.items() if value is not None or field == "usage"}
    assert come_to | {"events": [event["type"] for event in told[2:]]} == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_legal_as_it_leaves_us(name: str) -> None:
    told = play(name)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert judge(told) == told[-1]["response"]["output"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_the_same_wherever_it_is_cut(name: str) -> None:
    raw = load(name)
    assert replay(ResponsesReader, [raw[i : i + 1] for i in range(len(raw))]) == play(name)
    assert find_harmful_cuts(raw) == []


def test_a_4_ids_that_change_with_every_event_become_one() -> None:
    told = play("ids_that_change")
    ids = {
        (event["output_index"], event.get("item_id") or event["item"]["id"])
        for event in told
        if "output_index" in event
    }
    assert ids == {(0, "rs_0"), (1, "msg_1"), (2, "fc_2")}


def test_the_events_of_a_hosted_tool_stand_between_its_beginning_and_its_end() -> None:
    told = [event for event in play("web_search") if event.get("output_index") == 0]
    assert [(event["type"], event.get("item_id") or event["item"]["id"]) for event in told] == [
        ("response.output_item.added", "ws_0"),
        ("response.web_search_call.in_progress", "ws_0"),
        ("response.web_search_call.searching", "ws_0"),
        ("response.web_search_call.completed", "ws_0"),
        ("response.output_item.done", "ws_0"),
    ]


def test_what_nobody_knows_passes_as_it_came() -> None:
    told = {event["type"]: event for event in play("unknown_item_and_events")}
    assert told["acme.tick"] == {
        "type": "acme.tick",
        "sequence_number": told["acme.tick"]["sequence_number"],
        "at": 1.5,
    }
    glowing = told["response.hologram_call.glowing"]
    assert (glowing["item_id"], glowing["output_index"], glowing["glow"]) == ("holo_0", 0, 1.0)


def test_an_event_passes_byte_for_byte_but_for_its_number() -> None:
    raw = b'{"type":"acme.tick","sequence_number":7,"at":1.50e+00,"big":12345678901234567890123}'
    [delta] = ResponsesReader().read(SseMessage("acme.tick", raw))
    assert delta.event.raw == raw  # type: ignore[union-attr]


def test_an_answer_that_comes_whole_is_read_too() -> None:
    response = {
        "object": "response",
        "id": "resp_up",
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}],
        "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
    }
    reader = ResponsesReader()
    told = reader.read(SseMessage(None, json.dumps(response).encode()))
    assert [delta for delta in told if isinstance(delta, Text)] == [Text("Hi")]
    assert isinstance(told[-2], TokenUsage)
    assert told[-1] == Finish()
    assert reader.finished


@pytest.mark.parametrize("data", [b"{", b"[1]", b'"x"', b"\xff"])
def test_what_is_no_event_is_the_upstreams_fault(data: bytes) -> None:
    with pytest.raises(AntiphonError, match="cannot be read"):
        ResponsesReader().read(SseMessage(None, data))


def test_secrets_in_an_error_are_blotted_out() -> None:
    data = b'{"type":"error","error":{"message":"The key hunter2 is wrong","type":"authentication_error"}}'
    with pytest.raises(AntiphonError) as caught:
        ResponsesReader(secrets={"hunter2"}).read(SseMessage("error", data))
    assert "hunter2" not in caught.value.message


def test_the_id_and_the_output_of_a_completed_response_are_settled() -> None:
    settled: list[tuple[str, int]] = []
    replay(lambda: ResponsesReader(settle=lambda name, output: settled.append((name, len(output)))), [load("phases")])
    replay(lambda: ResponsesReader(settle=lambda name, output: settled.append((name, len(output)))), [load("failed")])
    replay(
        lambda: ResponsesReader(settle=lambda name, output: settled.append((name, len(output)))), [load("empty_output")]
    )
    assert settled == [("resp_up", 2), ("resp_up", 1)]


OBJECTS = read_objects(CORPUS)


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(OBJECTS, ResponsesReader, data)) == 1


def tell(*events: Any) -> list[Any]:
    reader = ResponsesReader()
    return [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]


WORD = {"type": "response.output_text.delta", "delta": "a"}
ENDED = {"type": "response.completed", "response": {"id": "resp_up", "status": "completed"}}


@pytest.mark.parametrize(
    "beside",
    [
        {"logprobs": [{"token": 5, "logprob": "x", "bytes": "y", "top_logprobs": [None]}, None]},
        {"logprobs": "x"},
        {"content_index": "0", "output_index": "0"},
    ],
)
def test_what_is_said_is_told_though_something_beside_it_makes_no_sense(beside: Any) -> None:
    assert [delta.text for delta in tell(WORD | beside)] == ["a"]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.content_part.done", "part": "x"},
        {"type": "response.reasoning_summary_part.done", "part": "x"},
        {"type": "response.output_text.annotation.added", "annotation": None},
    ],
)
def test_an_event_without_what_it_is_about_says_nothing(event: Any) -> None:
    assert tell(WORD, event) == [Text("a")]


def test_counts_that_make_no_sense_cost_no_answer() -> None:
    usage = {"input_tokens": None, "output_tokens": -3, "input_tokens_details": [1], "output_tokens_details": "x"}
    assert tell(WORD, ENDED | {"response": {"id": "r", "output": "x", "usage": usage}}) == [Text("a"), Finish()]


@pytest.mark.parametrize("item", [None, "x", {}, []])
@pytest.mark.parametrize("name", ["added", "done"])
def test_an_item_that_is_none_is_an_error(name: str, item: Any) -> None:
    with pytest.raises(UpstreamError, match="an item that is none"):
        tell({"type": f"response.output_item.{name}", "item": item, "output_index": 0})


@pytest.mark.parametrize("event", [{"type": "response.completed"}, {"type": "response.completed", "response": None}])
def test_an_end_without_anything_is_an_error(event: Any) -> None:
    with pytest.raises(UpstreamError, match="without having said anything"):
        tell(event)


def test_the_id_of_a_call_is_text() -> None:
    call = {"type": "function_call", "id": "fc", "call_id": 5, "name": "f", "arguments": "{}", "namespace": []}
    assert tell({"type": "response.output_item.added", "item": call})[0] == ToolCall(0, "", "f", "5")


def call(item_id: str, call_id: str, name: str) -> dict[str, Any]:
    return {"type": "function_call", "id": item_id, "call_id": call_id, "name": name, "arguments": f'"{name}"'}


def done(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.output_item.done", "item": item}


def completed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.completed", "response": {"id": "resp_up", "status": "completed", "output": items}}


F, G = call("fc_1", "call_1", "f"), call("fc_2", "call_1", "g")


@pytest.mark.parametrize(
    "events",
    [
        [done(F), done(G), completed()],
        [done(F), done(G), completed(F, G)],
        [done(F), completed(F, G)],
        [done(F), completed(F | {"id": "fc_3"}, G | {"id": "fc_4"})],
        [completed(F, G)],
        [done(F), done(F), done(G | {"id": "fc_1", "call_id": "call_2"}), completed()],
    ],
    ids=["told", "told twice", "one at the end", "one at the end, under new ids", "both at the end", "one item id"],
)
def test_no_call_is_taken_for_another_that_has_its_id(events: list[dict[str, Any]]) -> None:
    reader = ResponsesReader()
    told = [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]
    calls = [delta for delta in told if isinstance(delta, ToolCall)]
    assert [(delta.key, delta.name, delta.arguments) for delta in calls] == [
        (0, "f", ""),
        (0, "", '"f"'),
        (1, "g", ""),
        (1, "", '"g"'),
    ]


@pytest.mark.parametrize("data", [b"out of memory", b'{"type":"server_error","message":"out of memory"}'])
def test_an_event_that_is_called_an_error_is_one_whatever_stands_in_it(data: bytes) -> None:
    with pytest.raises(UpstreamError, match="The upstream failed: out of memory"):
        ResponsesReader().read(SseMessage("error", data))


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"}
THINKING = {"type": "response.output_item.added", "output_index": 0, "item": THOUGHT | {"encrypted_content": None}}
THINKS = {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "Hm."}
CALLED = [
    {"type": "response.output_item.added", "output_index": 1, "item": F | {"arguments": ""}},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '"f"'},
]


@pytest.mark.parametrize(
    ("begun", "thought", "expected"),
    [
        ([THINKING, THINKS], {"summary": [{"type": "summary_text", "text": "Hm."}]}, [["Hm."]]),
        ([THINKING], {}, []),
        ([], {}, []),
    ],
    ids=["it was told", "it was announced", "it was not"],
)
def test_a_seal_that_comes_when_its_reasoning_is_over_makes_no_item(
    begun: list[Any], thought: Any, expected: list[Any]
) -> None:
    events = [*begun, *CALLED, completed(THOUGHT | thought, F)]
    raw = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
    *told, called = replay(ResponsesReader, [raw])[-1]["response"]["output"]
    assert [[part["text"] for part in item["summary"]] for item in told] == expected
    assert (called["type"], called["arguments"]) == ("function_call", '"f"')


def test_a_seal_that_comes_while_its_reasoning_is_the_last_goes_with_it() -> None:
    thought = THOUGHT | {"summary": [{"type": "summary_text", "text": "Hm."}]}
    raw = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in [THINKING, THINKS, completed(thought, F)])
    told = replay(ResponsesReader, [raw])[-1]["response"]["output"]
    assert [(item["type"], item.get("encrypted_content")) for item in told] == [
        ("reasoning", "opaque"),
        ("function_call", None),
    ]
