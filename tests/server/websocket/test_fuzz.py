"""Any text message is answered, and the connection stays open."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.live_server import LiveServer, make_settings
from support.websocket_client import TERMINAL, WebSocketClient

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NAMES = st.sampled_from(
    ["model", "input", "previous_response_id", "stream_id", "generate", "stream", "store", "tools", "x"]
)
TYPES = st.sampled_from(["response.create", "response.steer", "response.stop", "", None, 7])
MESSAGES = (
    st.tuples(TYPES, st.dictionaries(NAMES, JSON, max_size=4)).map(
        lambda pair: json.dumps({"type": pair[0], **pair[1]})
    )
    | JSON.map(json.dumps)
    | st.text(max_size=50)
)


@pytest.fixture(scope="module")
def client() -> Iterator[WebSocketClient]:
    # No pings from either side: they draw from the global random state, and hypothesis fails if that changes.
    running = LiveServer({}, make_settings(keepalive_seconds=0))
    with WebSocketClient(running, ping_interval=None) as client:
        yield client
    running.stop()


@pytest.mark.usefixtures("unchecked_wire")
@given(MESSAGES)
def test_every_message_is_answered_and_keeps_the_connection(client: WebSocketClient, message: str) -> None:
    client.send(message)
    answer = client.read()
    while answer["type"] not in (*TERMINAL, "error", "response.steer.failed"):
        answer = client.read()
    assert answer.get("status", 400) < 500
    assert client.ask("hi")["status"] == "completed"
