"""Items and events that are forwarded from an upstream."""

import json
from typing import Any

import msgspec
import pytest

from antiphon.protocol import events, items
from antiphon.protocol.hosted import CodeInterpreterCall, ImageGenerationCall, McpCall
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import IllegalDelta
from support.composing import compose, compose_response


def test_unknown_event_is_forwarded_with_next_sequence_number() -> None:
    stream = compose(d.Passthrough(Unknown(b'{"type":"acme.tick","sequence_number":77,"x":1.50}')), d.Finish())
    assert isinstance(stream[2], Unknown)
    assert stream[2].raw == b'{"type":"acme.tick","sequence_number":2,"x":1.50}'


SEARCH = items.WebSearchCall("ws_up", {"type": "search"}, "completed")


SEARCHING = Unknown(b'{"type":"response.web_search_call.searching","item_id":"ws_up","output_index":9,"x":1.50}')


def test_passthrough_item_keeps_events_under_new_id() -> None:
    begun = Unknown(b'{"type":"web_search_call","id":"ws_up","status":"in_progress"}')
    turn = (d.Text("a"), d.OpenItem(3, begun, "ws"), d.ItemPassthrough(SEARCHING, 3), d.CloseItem(3, SEARCH))
    assert compose(*turn)[-3:] == [
        events.OutputItemAdded(8, 1, Unknown(b'{"type":"web_search_call","id":"ws_2","status":"in_progress"}')),
        Unknown(
            b'{"type":"response.web_search_call.searching","item_id":"ws_2","output_index":1,"x":1.50,'
            b'"sequence_number":9}'
        ),
        events.OutputItemDone(10, 1, items.WebSearchCall("ws_2", {"type": "search"}, "completed")),
    ]


def test_item_event_without_key_gets_id_of_open_message() -> None:
    event = Unknown(b'{"type":"acme.glow","item_id":"msg_up","item":{"id":"msg_up","n":1}}')
    assert compose(d.Text("a"), d.ItemPassthrough(event))[-1] == Unknown(
        b'{"type":"acme.glow","item_id":"msg_1","item":{"id":"msg_1","n":1},"sequence_number":5}'
    )


@pytest.mark.parametrize(
    ("item", "left"),
    [
        (items.WebSearchCall("ws_up", {}, "searching"), items.WebSearchCall("ws_1", {}, "incomplete")),
        (ImageGenerationCall("ig_up", "generating"), ImageGenerationCall("ws_1", "failed")),
        (
            Unknown(b'{"type":"acme","status":"in_progress"}'),
            Unknown(b'{"type":"acme","status":"incomplete","id":"ws_1"}'),
        ),
        (Unknown(b'{"type":"acme"}'), Unknown(b'{"type":"acme","id":"ws_1"}')),
    ],
)
def test_unclosed_passthrough_item_is_incomplete(item: Any, left: Any) -> None:
    assert compose_response(d.OpenItem(0, item, "ws"), d.Finish("length")).output == [left]


@pytest.mark.parametrize(
    ("opened", "event", "left"),
    [
        (
            McpCall("", "add", "s", status="in_progress"),
            "mcp_call_arguments",
            McpCall('{"a": 1', "add", "s", "mcp_1", status="incomplete"),
        ),
        (
            CodeInterpreterCall("cntr_1", "", "in_progress", ""),
            "code_interpreter_call_code",
            CodeInterpreterCall("cntr_1", "mcp_1", "incomplete", '{"a": 1'),
        ),
    ],
)
def test_item_that_is_cut_off_has_what_its_events_wrote(opened: Any, event: str, left: Any) -> None:
    pieces = [
        Unknown(json.dumps({"type": f"response.{event}.delta", "delta": each}).encode()) for each in ('{"a"', ": 1")
    ]
    deltas = [d.OpenItem(0, opened, "mcp"), *(d.ItemPassthrough(each, 0) for each in pieces)]
    assert compose_response(*deltas, d.Finish("cancelled")).output == [left]
    finished = msgspec.structs.replace(left, id="", status="completed")
    assert compose_response(*deltas, d.CloseItem(0, finished), d.Finish()).output == [
        msgspec.structs.replace(left, status="completed")
    ]


def test_reused_item_key_is_illegal() -> None:
    with pytest.raises(IllegalDelta, match="already in use"):
        compose(d.OpenItem(0, SEARCH), d.CloseItem(0), d.OpenItem(0, SEARCH))
