"""Interleaved lanes produce the same events as lanes that run alone."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.live_server import LiveServer, make_settings
from support.websocket_client import WebSocketClient, normalise

LANES = ("a", "b", None)
TURNS = ("text", "call", "fail")
GATES = 2


def gate(lane: str | None, turn: str) -> str:
    return f"{lane}-{turn}"


def make_answer(lane: str | None, turn: str) -> list[dict[str, Any]]:
    """Return a script: text between gates, and the end of this kind of turn."""
    ends = {
        "text": [{"text": "done."}],
        "call": [{"reasoning": "so"}, {"tool_call": {"name": "f", "arguments": {"lane": lane}}}],
        "fail": [{"failure": {"message": "No.", "code": "model_error"}}],
    }
    steps: list[dict[str, Any]] = []
    for number in range(GATES):
        steps += [{"text": f"{lane} {number} "}, {"wait": gate(lane, turn)}]
    return steps + ends[turn]


SCRIPT = {
    "rules": [{"user": gate(lane, turn), "answers": [make_answer(lane, turn)]} for lane in LANES for turn in TURNS],
}
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    # No pings from either side: they draw from the global random state, and hypothesis fails if that changes.
    running = LiveServer(SCRIPT, make_settings(keepalive_seconds=0))
    yield running
    running.stop()


def ask(client: WebSocketClient, lane: str | None, turn: str) -> None:
    options = {} if lane is None else {"stream_id": lane}
    client.create(gate(lane, turn), tools=TOOLS, store=False, **options)


@pytest.fixture(scope="module")
def alone(running: LiveServer) -> dict[str | None, list[Any]]:
    """The events of each lane when no other lane runs."""
    events: dict[str | None, list[Any]] = {}
    with WebSocketClient(running, ping_interval=None) as client:
        for lane in LANES:
            events[lane] = []
            for turn in TURNS:
                for _ in range(GATES):
                    running.do(lambda lane=lane, turn=turn: running.backend.release(gate(lane, turn)))
                ask(client, lane, turn)
                events[lane].append(normalise(client.finish(lane)))
    return events


# Each step requests a lane's next turn, or releases a lane's next gate. Only the order differs.
ASKS = [("ask", lane) for lane in LANES for _ in TURNS]
STEPS = [("step", lane) for lane in LANES for _ in TURNS for _ in range(GATES)]


@given(st.permutations(ASKS + STEPS))
def test_interleaved_lanes_produce_the_events_of_separate_runs(
    running: LiveServer, alone: dict[str | None, list[Any]], order: list[tuple[str, str | None]]
) -> None:
    asks = {lane: iter(TURNS) for lane in LANES}
    steps = {lane: (turn for turn in TURNS for _ in range(GATES)) for lane in LANES}
    with WebSocketClient(running, ping_interval=None) as client:
        for act, lane in order:
            if act == "ask":
                ask(client, lane, next(asks[lane]))
            else:
                name = gate(lane, next(steps[lane]))
                running.do(lambda name=name: running.backend.release(name))
        together = {lane: [normalise(client.finish(lane)) for _ in TURNS] for lane in LANES}
    assert together == alone
