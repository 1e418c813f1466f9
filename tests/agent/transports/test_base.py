"""A response out of its events, whatever servers leave out or get wrong."""

import json
from typing import Any

import pytest

from antiphon.agent.transports.base import ResponseCollector, decode_event
from antiphon.errors import AntiphonError, ServerError, UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.unions import Unknown

FIRST = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look_up", "arguments": "{}"}
SECOND = {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "look_up", "arguments": "{}"}
COMPLETED = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}}


def done(item: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "item": item} | fields


def gather(*events: dict[str, Any]) -> ResponseCollector:
    collector = ResponseCollector()
    collector.feed([codec.decode_event(json.dumps(event).encode()) for event in events])
    return collector


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


@pytest.mark.parametrize(
    ("events", "output"),
    [
        ([done(FIRST, output_index=0), done(SECOND, output_index=1)], [FIRST, SECOND]),
        ([done(SECOND, output_index=1), done(FIRST, output_index=0)], [FIRST, SECOND]),
        ([done(FIRST, output_index=0), done(SECOND, output_index=0)], [FIRST, SECOND]),
        ([done(FIRST), done(SECOND)], [FIRST, SECOND]),
        ([done(FIRST, output_index=None), done(SECOND, output_index=None)], [FIRST, SECOND]),
        ([done(without_id(FIRST), output_index=0), done(without_id(SECOND), output_index=0)], None),
        ([done(FIRST | {"arguments": ""}, output_index=0), done(FIRST, output_index=0)], [FIRST]),
        (
            [done(FIRST, output_index=0), done(SECOND | {"id": "fc_1"}, output_index=1)],
            [FIRST, SECOND | {"id": "fc_1"}],
        ),
    ],
    ids=[
        "in order",
        "out of order",
        "in one place",
        "without places",
        "places that are null",
        "in one place, without ids",
        "told again",
        "one id for two",
    ],
)
def test_items_are_neither_lost_nor_duplicated(events: list[dict[str, Any]], output: list[Any] | None) -> None:
    expected = [without_id(FIRST), without_id(SECOND)] if output is None else output
    assert gather(*events, COMPLETED).finish()["output"] == expected


def test_output_of_the_terminal_event_counts() -> None:
    ended = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [SECOND]}}
    assert gather(done(FIRST, output_index=0), ended).finish()["output"] == [SECOND]


def test_first_terminal_event_counts() -> None:
    failed = {"type": "response.failed", "response": {"id": "r", "status": "failed", "error": {"message": "No."}}}
    assert gather(done(FIRST, output_index=0), COMPLETED, failed).finish()["output"] == [FIRST]


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ({"type": "error", "error": "No."}, ServerError, "No."),
        ({"type": "error", "message": "No."}, ServerError, "No."),
        ({"type": "error", "error": {"message": "No."}}, ServerError, "No."),
        ({"type": "response.failed", "response": {"status": "failed", "error": "No."}}, ServerError, "No."),
        (done(None), UpstreamError, "The server sent a malformed event."),
        (done("text"), UpstreamError, "The server sent a malformed event."),
        (
            {"type": "response.completed", "response": [1]},
            UpstreamError,
            "The server sent a malformed event.",
        ),
    ],
)
def test_stream_errors_are_mapped(event: dict[str, Any], kind: type[AntiphonError], message: str) -> None:
    with pytest.raises(kind) as raised:
        gather(event).finish()
    assert raised.value.message == message


# Decoding


@pytest.mark.parametrize("name", ["response.created", "response.queued", "response.in_progress"])
def test_first_events_are_not_decoded(name: str) -> None:
    body = json.dumps({"type": name, "sequence_number": 0, "response": {"id": "r", "tools": ["\u00e4"]}}).encode()
    event = decode_event(name, body)
    assert event == Unknown(body)
    assert event.type == name


@pytest.mark.parametrize("body", [b"", b"no", b'{"type":"response.created"', b'{"type":"response.created","a":"\xff"}'])
@pytest.mark.parametrize("name", [None, "response.created"])
def test_event_that_is_not_json_is_refused(name: str | None, body: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_event(name, body)


def test_deeply_nested_event_is_not_decoded() -> None:
    body = b'{"type":"response.created","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert decode_event("response.created", body) == codec.decode_event(body) == Unknown(body)


def test_event_under_a_wrong_name_is_collected() -> None:
    collector = ResponseCollector()
    collector.feed([decode_event("response.created", json.dumps(COMPLETED).encode())])
    assert collector.finish() == COMPLETED["response"]
