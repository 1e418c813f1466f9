"""Two nodes on one PostgreSQL database: either of them retrieves, follows and cancels a response in progress."""

import http.client
import json
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
