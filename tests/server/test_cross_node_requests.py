"""Two nodes on one PostgreSQL database: either of them retrieves, follows and cancels a response in progress."""

import asyncio
import http.client
import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from antiphon.config.settings import ApiKey
from antiphon.store.location import locate_store
from support.crashing_server import read_events, wait_until
from support.live_server import TIMEOUT, HttpResponse, LiveServer, make_settings
from support.postgres_server import EmptySchema
from support.websocket_client import WebSocketClient

LONG = "Speak slowly. " * 2000  # more than one notification
SCRIPT = {"rules": [{"user": "wait", "answers": [[{"text": ["first ", "second "]}, {"wait": "gate"}]]}]}
ADA, BOB = {"Authorization": "Bearer sk-ada"}, {"Authorization": "Bearer sk-bob"}
RESUME_REFUSED = {
    "message": "Only the stream of a background response can be resumed: create it with 'background: true'.",
    "type": "invalid_request_error",
    "param": "stream",
    "code": "invalid_value",
}
CANCEL_REFUSED = {
    "message": "Cannot cancel a synchronous response.",
    "type": "invalid_request_error",
    "param": "response_id",
    "code": "invalid_value",
}


@pytest.fixture(scope="module")
def nodes(postgres_schema: EmptySchema) -> Iterator[list[LiveServer]]:
    keys = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
    started = [LiveServer(SCRIPT, make_settings(api_keys=keys), locate_store(postgres_schema.url)) for _ in range(2)]
    wait_until(lambda: all(node.engine.admin_store.reports_changes for node in started))
    yield started
    for node in started:
        node.stop()
    postgres_schema.clear()


@pytest.fixture(params=["same node", "other node"])
def second(request: pytest.FixtureRequest, nodes: list[LiveServer]) -> LiveServer:
    """The node that is asked for the response. The first node has created it."""
    return nodes[request.param == "other node"]


def make_not_found(response_id: str) -> dict[str, Any]:
    return {
        "message": f"Response with id '{response_id}' not found.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": "not_found",
    }


class SseStream:
    """A stream in progress, of which nothing is read in advance."""

    def __init__(self, node: LiveServer, **fields: Any) -> None:
        body = {"model": "scripted", "input": "wait", "stream": True} | fields
        self._connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=TIMEOUT)
        self._connection.request("POST", "/v1/responses", json.dumps(body), ADA)
        self._events = read_events(self._connection.getresponse())

    def read(self) -> Any:
        return json.loads(next(self._events))

    def read_last(self) -> Any:
        return json.loads([*self._events][-1])

    def close(self) -> None:
        self._connection.close()


class WebSocketStream:
    """The same on a WebSocket."""

    def __init__(self, node: LiveServer, **fields: Any) -> None:
        self._client = WebSocketClient(node, key="sk-ada")
        self._client.create("wait", **fields)

    def read(self) -> Any:
        return self._client.read()

    def read_last(self) -> Any:
        return self._client.finish()[-1]

    def close(self) -> None:
        self._client.socket.close()


Begin = Callable[..., SseStream | WebSocketStream]


def call(node: LiveServer, method: str, path: str, headers: dict[str, str] = ADA) -> tuple[int, Any]:
    answer: HttpResponse = node.ask(method, f"/v1/responses/{path}", headers=headers)
    return answer.status, answer.json.get("error") or answer.json


@pytest.mark.parametrize("begin", [SseStream, WebSocketStream])
def test_foreground_response_in_progress_is_served_alike(
    nodes: list[LiveServer], second: LiveServer, begin: Begin
) -> None:
    with closing(begin(nodes[0], instructions=LONG)) as stream:
        begun = stream.read()["response"]
        path = begun["id"]
        status, retrieved = call(second, "GET", path)
        assert (status, retrieved["id"], retrieved["status"]) == (200, path, "in_progress")
        assert retrieved["instructions"] == LONG
        assert call(second, "GET", f"{path}?stream=true") == (400, RESUME_REFUSED)
        assert call(second, "GET", f"{path}?stream=true&starting_after=0") == (400, RESUME_REFUSED)
        status, listed = call(second, "GET", f"{path}/input_items")
        assert (status, [item["content"][0]["text"] for item in listed["data"]]) == (200, ["wait"])
        status, cancelled = call(second, "POST", f"{path}/cancel")
        assert (status, cancelled["id"], cancelled["status"]) == (200, path, "cancelled")
        assert stream.read_last()["response"] == cancelled
    assert call(second, "GET", path) == call(nodes[0], "GET", path) == (200, cancelled)
    assert call(second, "POST", f"{path}/cancel") == (200, cancelled)
    assert call(second, "GET", f"{path}?stream=true") == (400, RESUME_REFUSED)


def test_input_of_a_response_in_progress_is_listed_alike(nodes: list[LiveServer], second: LiveServer) -> None:
    given = [{"role": "user", "content": text} for text in ("a", "b", "c", "wait")]
    with closing(SseStream(nodes[0], input=given)) as stream:
        path = stream.read()["response"]["id"] + "/input_items"
        _, whole = call(second, "GET", f"{path}?order=asc")
        items = whole["data"]
        assert ([item["content"][0]["text"] for item in items], whole["has_more"]) == (["a", "b", "c", "wait"], False)
        pages = [
            call(second, "GET", f"{path}?limit=2&order=asc"),
            call(second, "GET", f"{path}?limit=2&order=asc&after={items[1]['id']}"),
            call(second, "GET", f"{path}?limit=2&after={items[3]['id']}"),
        ]
        assert [(status, page["data"], page["has_more"]) for status, page in pages] == [
            (200, items[:2], True),
            (200, items[2:], False),
            (200, [items[2], items[1]], True),
        ]
        unknown = {"message": "No item with id 'msg_x' in this list.", "param": "after", "code": "invalid_value"}
        expected = (400, unknown | {"type": "invalid_request_error"})
        assert call(second, "GET", f"{path}?after=msg_x") == expected


async def test_page_of_a_large_input_is_sent_without_the_rest(
    nodes: list[LiveServer], postgres_schema: EmptySchema
) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    large = "".join(map(chr, random.Random(0).choices(range(0x4E00, 0x9FFF), k=500_000)))  # hard to compress
    received: list[str] = []
    connection = await asyncpg.connect(postgres_schema.url)
    try:
        channel = f"antiphon_{postgres_schema.name}"
        await connection.add_listener(channel, lambda *notification: received.append(notification[-1]))
        with closing(
            SseStream(nodes[0], input=[{"role": "user", "content": text} for text in (large, "wait")])
        ) as stream:
            path = stream.read()["response"]["id"]
            status, page = await asyncio.to_thread(call, nodes[1], "GET", f"{path}/input_items?limit=1")
            assert (status, page["data"][0]["content"][0]["text"], page["has_more"]) == (200, "wait", True)
        await connection.execute("SELECT 1")
    finally:
        await connection.close()
    assert 0 < sum(map(len, received)) < 50_000


@pytest.mark.parametrize("begin", [SseStream, WebSocketStream])
def test_foreground_response_in_progress_is_deleted_alike(
    nodes: list[LiveServer], second: LiveServer, begin: Begin
) -> None:
    with closing(begin(nodes[0])) as stream:
        path = stream.read()["response"]["id"]
        assert call(second, "DELETE", path, BOB) == (404, make_not_found(path))
        assert call(second, "DELETE", path) == (200, {"id": path, "object": "response", "deleted": True})
        assert stream.read_last()["response"]["status"] == "cancelled"
    for node in (nodes[0], second):
        assert call(node, "GET", path) == (404, make_not_found(path))


def test_foreground_response_without_storage_is_cancelled_only(nodes: list[LiveServer], second: LiveServer) -> None:
    with closing(SseStream(nodes[0], store=False)) as stream:
        path = stream.read()["response"]["id"]
        assert call(second, "GET", path) == (404, make_not_found(path))
        assert call(second, "GET", f"{path}?stream=true") == (404, make_not_found(path))
        status, cancelled = call(second, "POST", f"{path}/cancel")
        assert (status, cancelled["status"], cancelled["store"]) == (200, "cancelled", False)
        assert stream.read_last()["response"] == cancelled
    assert call(second, "POST", f"{path}/cancel") == (404, make_not_found(path))


def test_ended_foreground_response_is_served_alike(nodes: list[LiveServer], second: LiveServer) -> None:
    created = nodes[0].ask("POST", "/v1/responses", {"model": "scripted", "input": "Hello"}, headers=ADA).json
    path = created["id"]
    assert call(second, "GET", path) == (200, created)
    assert call(second, "POST", f"{path}/cancel") == (400, CANCEL_REFUSED)
    assert call(second, "GET", f"{path}?stream=true&starting_after=1") == (400, RESUME_REFUSED)


@pytest.mark.parametrize("streamed", [True, False])
def test_background_response_in_progress_is_served_alike(
    nodes: list[LiveServer], second: LiveServer, *, streamed: bool
) -> None:
    body = {"model": "scripted", "input": "wait", "background": True}
    stream = SseStream(nodes[0], background=True) if streamed else None
    begun = (
        nodes[0].ask("POST", "/v1/responses", body, headers=ADA).json if stream is None else stream.read()["response"]
    )
    path = begun["id"]
    status, retrieved = call(second, "GET", path)
    assert (status, retrieved["status"] in ("queued", "in_progress")) == (200, True)
    following = http.client.HTTPConnection("127.0.0.1", second.port, timeout=TIMEOUT)
    with closing(following):
        following.request("GET", f"/v1/responses/{path}?stream=true&starting_after=1", headers=ADA)
        events = map(json.loads, read_events(following.getresponse()))
        received = [next(event for event in events if event.get("delta") == "second ")]
        status, cancelled = call(second, "POST", f"{path}/cancel")
        assert (status, cancelled["id"], cancelled["status"]) == (200, path, "cancelled")
        received += events
    assert received[-1]["response"] == cancelled
    numbers = [event["sequence_number"] for event in received]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if stream is not None:
        with closing(stream):
            assert stream.read_last() == received[-1]
    assert call(second, "GET", path) == call(nodes[0], "GET", path) == (200, cancelled)
    assert call(second, "POST", f"{path}/cancel") == (200, cancelled)


def test_response_of_another_project_is_unknown_on_every_node(nodes: list[LiveServer], second: LiveServer) -> None:
    with closing(SseStream(nodes[0])) as stream:
        foreign = stream.read()["response"]["id"]
        unknown = "resp_" + "0" * (len(foreign) - 5)
        for path in (foreign, unknown, "x" * 2000):
            not_found = (404, make_not_found(path))
            assert call(second, "GET", path, BOB) == not_found
            assert call(second, "GET", f"{path}?stream=true", BOB) == not_found
            assert call(second, "POST", f"{path}/cancel", BOB) == not_found
        assert call(second, "POST", f"{foreign}/cancel")[0] == 200
