"""Answers of MCP servers that belong to another request, and limits on their messages."""

import json
from typing import Any

import pytest

pytest.importorskip("mcp")

import httpx2

from antiphon.tools.mcp_http import MAX_VALUES, McpHttpClient, MessageSize

EVENT = b'data: {"a": 1}'


@pytest.mark.parametrize(
    ("sent", "status", "answer"),
    [
        ({"id": 1, "method": "x"}, 200, {"id": 1, "result": {}}),
        ({"id": 1, "method": "x"}, 200, {"id": "1", "result": {}}),
        ({"id": "a", "method": "x"}, 200, {"id": "a", "error": {"code": 1, "message": "no"}}),
        ({"id": 1, "method": "x"}, 400, {"id": None, "error": {"code": 1, "message": "no"}}),
        ({"id": 1, "method": "x"}, 202, {"id": 2}),
        ({"id": 1, "method": "x"}, 200, [{"id": 2}]),
        ({"method": "x"}, 200, {"id": 2}),
    ],
)
async def test_other_responses_are_left_to_the_package(sent: dict[str, Any], status: int, answer: Any) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, json=answer))
    async with McpHttpClient(transport=transport) as client:
        response = await client.post("http://mcp.test/", json=sent)
    assert (response.status_code, json.loads(response.content)) == (status, answer)


@pytest.mark.parametrize("is_stream", [False, True])
def test_values_of_a_message_in_many_chunks_are_counted(is_stream: bool) -> None:
    message = MessageSize(is_stream=is_stream)
    message.add(b"data: [")
    results = []
    for _ in range(9):
        message.add(b"1," * (MAX_VALUES // 8))
        results.append(message.has_too_many_values())
    assert (results[0], results[-1]) == (False, True)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_ended_events_are_forgotten(end: bytes) -> None:
    message = MessageSize(is_stream=True)
    sizes = []
    for chunk in (EVENT, EVENT + end[:1], end[1:] + EVENT, EVENT + end + EVENT + end):
        message.add(chunk)
        assert not message.has_too_many_values()
        sizes.append(message.size)
    assert sizes == [len(EVENT), 2 * len(EVENT) + 1, len(EVENT), 0]


def test_body_that_is_no_stream_has_its_whole_size() -> None:
    message = MessageSize(is_stream=False)
    message.add(b"[]\n\n")
    message.add(b"[]\n\n")
    assert (message.has_too_many_values(), message.size) == (False, 8)
