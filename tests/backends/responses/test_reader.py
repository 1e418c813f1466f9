"""Translation of recorded streams, correct and faulty ones. A JSON file beside each has the expected response."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.errors import AntiphonError, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.content import FilePath, LogProb
from antiphon.protocol.response import Response, Usage
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Finish, Text, TokenUsage, ToolCall
from antiphon.stream.fold import fold
from antiphon.stream.sse import SseMessage, encode_batch
from support.damage import read_objects, replay_damaged
from support.replay import find_harmful_cuts, replay
from support.responses_backend import RECORDINGS, read_recording
from support.turns import turns

NAMES = sorted(path.stem for path in RECORDINGS.glob("*.sse"))


def play(name: str) -> list[dict[str, Any]]:
    return replay(ResponsesReader, [read_recording(name)])


def fold_output(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that a client builds from these events; raise if their order is invalid."""
    # The final response is left out, so that the output comes from the item events alone.
    bare = [
        event | {"response": event["response"] | {"output": []}} if "response" in event else event for event in events
    ]
    output: list[dict[str, Any]] = json.loads(
        codec.encode(fold(codec.decode_event(json.dumps(event).encode()) for event in bare).output)
    )
    return output


@pytest.mark.parametrize("name", NAMES)
def test_recorded_stream_gives_recorded_response(name: str) -> None:
    expected = json.loads((RECORDINGS / f"{name}.json").read_text("utf-8"))
    emitted = play(name)
    response = emitted[-1]["response"]
    result = {field: response[field] for field in ("status", "output", "usage", "error", "incomplete_details")}
    result = {field: value for field, value in result.items() if value is not None or field == "usage"}
    assert result | {"events": [event["type"] for event in emitted[2:]]} == expected


@pytest.mark.parametrize("name", NAMES)
def test_emitted_stream_is_valid(name: str) -> None:
    emitted = play(name)
    assert [event["sequence_number"] for event in emitted] == list(range(len(emitted)))
    assert fold_output(emitted) == emitted[-1]["response"]["output"]


@pytest.mark.parametrize("name", NAMES)
def test_stream_cut_at_any_byte_gives_same_events(name: str) -> None:
    raw = read_recording(name)
    assert replay(ResponsesReader, [raw[i : i + 1] for i in range(len(raw))]) == play(name)
    assert find_harmful_cuts(raw) == []


def test_a_4_changing_item_ids_become_one() -> None:
    emitted = play("ids_that_change")
    ids = {
        (event["output_index"], event.get("item_id") or event["item"]["id"])
        for event in emitted
        if "output_index" in event
    }
    assert ids == {(0, "rs_0"), (1, "msg_1"), (2, "fc_2")}


def test_hosted_tool_events_come_between_added_and_done() -> None:
    emitted = [event for event in play("web_search") if event.get("output_index") == 0]
    assert [(event["type"], event.get("item_id") or event["item"]["id"]) for event in emitted] == [
        ("response.output_item.added", "ws_0"),
        ("response.web_search_call.in_progress", "ws_0"),
        ("response.web_search_call.searching", "ws_0"),
        ("response.web_search_call.completed", "ws_0"),
        ("response.output_item.done", "ws_0"),
    ]


def test_unknown_events_pass_through() -> None:
    emitted = {event["type"]: event for event in play("unknown_item_and_events")}
    assert emitted["acme.tick"] == {
        "type": "acme.tick",
        "sequence_number": emitted["acme.tick"]["sequence_number"],
        "at": 1.5,
    }
    glowing = emitted["response.hologram_call.glowing"]
    assert (glowing["item_id"], glowing["output_index"], glowing["glow"]) == ("holo_0", 0, 1.0)


SEARCH = {"type": "web_search_call", "id": "ws_up", "status": "completed"}
SEARCHING = {"type": "response.web_search_call.searching", "item_id": "ws_up", "output_index": 0}
ADDED = {"type": "response.output_item.added", "output_index": 0, "item": SEARCH}
SEARCHED = {"type": "response.output_item.done", "output_index": 0, "item": SEARCH}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([ADDED, SEARCHING, SEARCHED], ["OpenItem", "ItemPassthrough", "CloseItem"]),
        ([SEARCHING, ADDED, SEARCHED], ["OpenItem", "ItemPassthrough", "CloseItem"]),
        ([ADDED, SEARCHED, SEARCHING], ["OpenItem", "CloseItem"]),
        ([SEARCHING], []),
    ],
    ids=["in order", "before its item", "after its item", "without its item"],
)
def test_item_event_is_forwarded_only_while_its_item_is_open(events: list[Any], expected: list[str]) -> None:
    assert [type(delta).__name__ for delta in read_events(*events, COMPLETED)] == [*expected, "Finish"]


THOUGHT = {"type": "reasoning", "id": "i", "summary": []}
CALL = {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize("index", [-1, 0, 1, 4])
@pytest.mark.parametrize(
    ("kind", "index_name", "name", "parts"),
    [
        ("message", "content_index", "output_text", "content"),
        ("reasoning", "content_index", "reasoning_text", "content"),
        ("reasoning", "summary_index", "reasoning_summary_text", "summary"),
    ],
)
def test_text_is_not_repeated_if_deltas_count_parts_differently(
    index: int, kind: str, index_name: str, name: str, parts: str
) -> None:
    text = {"type": f"response.{name}.delta", "item_id": "i", "output_index": 0, index_name: index, "delta": "a"}
    item = {"type": kind, "id": "i", "role": "assistant", "summary": [], parts: [{"type": name, "text": "a"}]}
    emitted = read_events(text, text | {"type": f"response.{name}.done", "text": "a"}, done(item), completed(item))
    assert [delta.text for delta in emitted if hasattr(delta, "text")] == ["a"]


@pytest.mark.parametrize(
    ("streamed", "parts", "expected"),
    [(["a", "ab"], ["a", "ab"], ["a", "ab"]), (["a"], ["a", "c"], ["a", "c"]), (["a"], ["a", "ac"], ["a", "ac"])],
    ids=["text that begins with another", "part without deltas", "part without deltas that begins with another"],
)
def test_parts_are_complete_if_deltas_count_them_from_one(
    streamed: list[str], parts: list[str], expected: list[str]
) -> None:
    item = {
        "type": "message",
        "id": "i",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text} for text in parts],
    }
    texts = [
        TEXT_DELTA | {"item_id": "i", "content_index": index, "delta": text} for index, text in enumerate(streamed, 1)
    ]
    emitted = read_events(*texts, done(item))
    assert [delta.text for delta in emitted if isinstance(delta, Text)] == expected


def test_equal_parts_of_a_message_stay_separate() -> None:
    part = {"type": "output_text", "text": "a"}
    item = {"type": "message", "id": "i", "role": "assistant", "content": [part, part]}
    emitted = read_events(TEXT_DELTA | {"item_id": "i", "content_index": 0}, done(item))
    assert [delta.text for delta in emitted if isinstance(delta, Text)] == ["a", "a"]


def test_unknown_event_passes_through_byte_for_byte() -> None:
    raw = b'{"type":"acme.tick","sequence_number":7,"at":1.50e+00,"big":12345678901234567890123}'
    [delta] = ResponsesReader().read(SseMessage("acme.tick", raw))
    assert delta.event.raw == raw  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [None, "", 5, ["acme.tick"], {}])
def test_unknown_event_without_a_type_is_dropped(kind: Any) -> None:
    """Its `event:` line would differ from its type."""
    assert list(ResponsesReader().read(SseMessage("acme.tick", json.dumps({"type": kind, "at": 1}).encode()))) == []


def test_unstreamed_answer_is_read() -> None:
    response = {
        "object": "response",
        "id": "resp_up",
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}],
        "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
    }
    reader = ResponsesReader()
    emitted = reader.read(SseMessage(None, json.dumps(response).encode()))
    assert [delta for delta in emitted if isinstance(delta, Text)] == [Text("Hi")]
    assert isinstance(emitted[-2], TokenUsage)
    assert emitted[-1] == Finish()
    assert reader.finished


@pytest.mark.parametrize("data", [b"{", b"[1]", b'"x"', b"\xff"])
def test_invalid_event_is_upstream_error(data: bytes) -> None:
    with pytest.raises(AntiphonError, match="invalid event"):
        ResponsesReader().read(SseMessage(None, data))


def test_error_message_is_redacted() -> None:
    data = b'{"type":"error","error":{"message":"The key hunter2 is wrong","type":"authentication_error"}}'
    with pytest.raises(AntiphonError) as caught:
        ResponsesReader(secrets={"hunter2"}).read(SseMessage("error", data))
    assert "hunter2" not in caught.value.message


def test_completed_response_is_reported_with_id_and_output() -> None:
    recorded: list[tuple[str, int]] = []
    replay(
        lambda: ResponsesReader(on_completed=lambda name, output: recorded.append((name, len(output)))),
        [read_recording("phases")],
    )
    replay(
        lambda: ResponsesReader(on_completed=lambda name, output: recorded.append((name, len(output)))),
        [read_recording("failed")],
    )
    replay(
        lambda: ResponsesReader(on_completed=lambda name, output: recorded.append((name, len(output)))),
        [read_recording("empty_output")],
    )
    assert recorded == [("resp_up", 2), ("resp_up", 1)]


OBJECTS = read_objects(RECORDINGS)


@given(st.data())
def test_damaged_stream_ends_in_one_terminal_event(data: st.DataObject) -> None:
    assert len(replay_damaged(OBJECTS, ResponsesReader, data)) == 1


def read_events(*events: Any) -> list[Any]:
    reader = ResponsesReader()
    return [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]


TEXT_DELTA = {"type": "response.output_text.delta", "delta": "a"}
COMPLETED = {"type": "response.completed", "response": {"id": "resp_up", "status": "completed"}}


@pytest.mark.parametrize(
    "faulty",
    [
        {"logprobs": [{"token": 5, "logprob": "x", "bytes": "y", "top_logprobs": [None]}, None]},
        {"logprobs": "x"},
        {"content_index": "0", "output_index": "0"},
    ],
)
def test_text_is_emitted_despite_invalid_fields(faulty: Any) -> None:
    assert [delta.text for delta in read_events(TEXT_DELTA | faulty)] == ["a"]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.content_part.done", "part": "x"},
        {"type": "response.reasoning_summary_part.done", "part": "x"},
        {"type": "response.output_text.annotation.added", "annotation": None},
    ],
)
def test_event_without_its_subject_is_ignored(event: Any) -> None:
    assert read_events(TEXT_DELTA, event) == [Text("a")]


def test_invalid_token_counts_do_not_fail_the_answer() -> None:
    usage = {"input_tokens": None, "output_tokens": -3, "input_tokens_details": [1], "output_tokens_details": "x"}
    assert read_events(TEXT_DELTA, COMPLETED | {"response": {"id": "r", "output": "x", "usage": usage}}) == [
        Text("a"),
        Finish(),
    ]


@pytest.mark.parametrize("item", [None, "x", {}, []])
@pytest.mark.parametrize("name", ["added", "done"])
def test_item_that_is_not_an_object_is_error(name: str, item: Any) -> None:
    with pytest.raises(UpstreamError, match="an output item that is not an object"):
        read_events({"type": f"response.output_item.{name}", "item": item, "output_index": 0})


@pytest.mark.parametrize("event", [{"type": "response.completed"}, {"type": "response.completed", "response": None}])
def test_completed_event_without_output_is_error(event: Any) -> None:
    with pytest.raises(UpstreamError, match="without any output"):
        read_events(event)


def test_parts_of_reasoning_as_vllm_names_them_are_not_forwarded() -> None:
    position = {"item_id": "i", "output_index": 0, "content_index": 0}
    part = {"type": "reasoning_text", "text": "Hm."}
    emitted = read_events(
        {"type": "response.output_item.added", "output_index": 0, "item": THOUGHT},
        {"type": "response.reasoning_part.added", "part": part | {"text": ""}} | position,
        {"type": "response.reasoning_text.delta", "delta": "Hm"} | position,
        {"type": "response.reasoning_part.done", "part": part} | position,
    )
    assert emitted == [d.NoStatus(), d.Reasoning("Hm"), d.Reasoning(".")]


@pytest.mark.parametrize("arguments", [None, "", {}])
@pytest.mark.parametrize("has_delta", [True, False])
def test_call_without_arguments_gets_an_object(arguments: Any, has_delta: bool) -> None:
    added = {"type": "response.output_item.added", "item": CALL | {"arguments": ""}}
    empty = {"type": "response.function_call_arguments.delta", "item_id": "i", "delta": ""}
    begun = [added, empty] if has_delta else []
    emitted = read_events(*begun, done(CALL | {"arguments": arguments}), COMPLETED)
    assert emitted == [ToolCall(0, "", "f", "c", has_end=True), ToolCall(0, "{}"), d.CloseItem(0), Finish()]


def test_incomplete_call_without_arguments_stays_empty() -> None:
    emitted = read_events(done(CALL | {"arguments": "", "status": "incomplete"}))
    assert emitted == [ToolCall(0, "", "f", "c", has_end=True), d.CloseItem(0, ending="incomplete")]


@pytest.mark.parametrize(
    ("fields", "arguments", "ending"),
    [
        ({"arguments": "", "status": "completed"}, [], "incomplete"),
        ({"arguments": None}, [], "incomplete"),
        ({"arguments": '{"a":', "status": "in_progress"}, [ToolCall(0, '{"a":')], "incomplete"),
        ({"arguments": "{}", "status": "completed"}, [ToolCall(0, "{}")], "completed"),
    ],
)
def test_last_call_of_an_incomplete_response_is_not_filled(fields: Any, arguments: list[Any], ending: Any) -> None:
    response = {"id": "resp_up", "status": "incomplete", "output": [CALL | fields]}
    emitted = read_events({"type": "response.incomplete", "response": response})
    assert emitted == [
        ToolCall(0, "", "f", "c", has_end=True),
        *arguments,
        d.CloseItem(0, ending=ending),
        Finish("length"),
    ]


@pytest.mark.parametrize(
    ("status", "finish"), [("completed", Finish()), (None, Finish()), ("incomplete", Finish("length"))]
)
def test_response_may_end_with_done(status: str | None, finish: Finish) -> None:
    ended = {"type": "response.done", "response": {"id": "resp_up", "status": status}}
    assert read_events(TEXT_DELTA, ended) == [Text("a"), finish]


def test_usage_of_bare_deltas_is_estimated_from_their_text() -> None:
    estimated: list[Any] = []

    def estimate(output: Any) -> Usage:
        estimated.extend(map(json.loads, map(bytes, output)))
        return Usage(1, 2, 3, estimated=True)

    reader = ResponsesReader(estimate=estimate)
    events = [TEXT_DELTA, TEXT_DELTA | {"delta": "b"}, COMPLETED]
    emitted = [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]
    assert emitted == [Text("a"), Text("b"), TokenUsage(Usage(1, 2, 3, estimated=True)), Finish()]
    assert estimated == [{"content": ["ab"]}]


def test_numeric_call_id_becomes_text() -> None:
    call = {"type": "function_call", "id": "fc", "call_id": 5, "name": "f", "arguments": "{}", "namespace": []}
    assert read_events({"type": "response.output_item.added", "item": call})[0] == ToolCall(
        0, "", "f", "5", has_end=True
    )


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
    ids=["done", "done and listed", "one listed", "one listed, with new ids", "both listed", "one item id"],
)
def test_calls_with_one_id_stay_separate(events: list[dict[str, Any]]) -> None:
    reader = ResponsesReader()
    emitted = [delta for event in events for delta in reader.read(SseMessage(None, json.dumps(event).encode()))]
    calls = [delta for delta in emitted if isinstance(delta, ToolCall)]
    assert [(delta.key, delta.name, delta.arguments) for delta in calls] == [
        (0, "f", ""),
        (0, "", '"f"'),
        (1, "g", ""),
        (1, "", '"g"'),
    ]


@pytest.mark.parametrize("data", [b"out of memory", b'{"type":"server_error","message":"out of memory"}'])
def test_error_event_with_any_data_is_error(data: bytes) -> None:
    with pytest.raises(UpstreamError, match="The upstream failed: out of memory"):
        ResponsesReader().read(SseMessage("error", data))


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"}
REASONING_ADDED = {
    "type": "response.output_item.added",
    "output_index": 0,
    "item": REASONING | {"encrypted_content": None},
}
SUMMARY_DELTA = {"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "Hm."}
CALL_EVENTS = [
    {"type": "response.output_item.added", "output_index": 1, "item": F | {"arguments": ""}},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '"f"'},
]


@pytest.mark.parametrize(
    ("first_events", "fields", "expected"),
    [
        ([REASONING_ADDED, SUMMARY_DELTA], {"summary": [{"type": "summary_text", "text": "Hm."}]}, [["Hm."]]),
        ([REASONING_ADDED], {}, []),
        ([], {}, []),
    ],
    ids=["summary emitted", "announced", "not announced"],
)
def test_seal_after_later_items_makes_no_item(first_events: list[Any], fields: Any, expected: list[Any]) -> None:
    events = [*first_events, *CALL_EVENTS, completed(REASONING | fields, F)]
    raw = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
    *emitted, called = replay(ResponsesReader, [raw])[-1]["response"]["output"]
    assert [[part["text"] for part in item["summary"]] for item in emitted] == expected
    assert (called["type"], called["arguments"]) == ("function_call", '"f"')


def test_seal_of_the_last_item_is_added_to_it() -> None:
    reasoning = REASONING | {"summary": [{"type": "summary_text", "text": "Hm."}]}
    raw = b"".join(
        f"data: {json.dumps(event)}\n\n".encode() for event in [REASONING_ADDED, SUMMARY_DELTA, completed(reasoning, F)]
    )
    emitted = replay(ResponsesReader, [raw])[-1]["response"]["output"]
    assert [(item["type"], item.get("encrypted_content")) for item in emitted] == [
        ("reasoning", "opaque"),
        ("function_call", None),
    ]


# Property tests with a composer as upstream


def write_stream(turn: list[d.Delta]) -> tuple[bytes, dict[str, Any]]:
    """Return the event stream of a turn, and its response."""
    numbers = itertools.count()
    response = Response(id="resp_up", created_at=1, model="m")
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_up{next(numbers)}", now=lambda: 9)
    stream = encode_batch([*composer.start(), *composer.compose(turn)])
    return stream, json.loads(codec.encode(composer.response))


def _without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in output]


def _fill_arguments(item: dict[str, Any]) -> dict[str, Any]:
    """Return a complete call without arguments with those that the reader adds."""
    is_filled = item["type"] == "function_call" and item["status"] != "incomplete" and not item["arguments"]
    return item | {"arguments": "{}"} if is_filled else item


@given(turns)
@example([d.Text("", (LogProb("x", -1.0),)), d.Refusal("No."), d.Annotate(FilePath("file_1", 0)), d.Finish("stop")])
def test_response_is_the_same_after_two_servers(turn: list[d.Delta]) -> None:
    stream, original = write_stream(turn)
    repeated = replay(ResponsesReader, [stream])[-1]["response"]
    assert _without_ids(repeated["output"]) == _without_ids(list(map(_fill_arguments, original["output"])))
    statuses = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "failed"}
    assert repeated["status"] == statuses[original["status"]]
    assert repeated["incomplete_details"] == original["incomplete_details"]
    if original["status"] in ("completed", "incomplete"):
        assert repeated["usage"] == original["usage"]


@given(turns)
def test_item_ids_are_new_and_unique(turn: list[d.Delta]) -> None:
    stream, _ = write_stream(turn)
    ids = [item.get("id") for item in replay(ResponsesReader, [stream])[-1]["response"]["output"]]
    assert len(set(ids)) == len(ids)
    assert not any("_up" in str(each) for each in ids)
