"""kill -9 during an answer of the embedded model: the next attempt gives the same output, and readers continue."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.protocol import codec
from antiphon.stream.fold import fold
from support.crashing_server import KillableServer, StreamReader

WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 200}
SCHEMA = {"type": "object", "properties": {"words": WORDS}, "required": ["words"], "additionalProperties": False}
# A high temperature would show different output at once. The schema prevents an early end.
BODY = {
    "model": "smollm2-135m",
    "input": "Which words do you know?",
    "text": {"format": {"type": "json_schema", "name": "words", "schema": SCHEMA}},
    "temperature": 1,
    "max_output_tokens": 60,
    "background": True,
}


@pytest.fixture
def start(tmp_path: Path, shallow_weights: Path) -> Iterator[Callable[[], KillableServer]]:
    started: list[KillableServer] = []

    def start_server() -> KillableServer:
        # The test counts events, so there must be no keep-alives.
        settings = {"background_lease_seconds": 0.5, "keepalive_seconds": 600}
        model = {"backends.embedded.kind": "embedded", "backends.embedded.weights": str(shallow_weights)}
        started.append(KillableServer(tmp_path, {}, **settings, **model))
        return started[-1]

    yield start_server
    for server in started:
        server.kill()


def kill_midway(start: Callable[[], KillableServer]) -> tuple[str, StreamReader]:
    """Return a response whose server was killed midway, and the reader of its events."""
    for _ in range(5):  # the model may finish before the kill if this process is slow
        server = start()
        response_id = server.ask("POST", "/v1/responses", BODY)["id"]
        before = StreamReader(server, response_id)
        before.wait_for(b'"sequence_number":20')
        server.kill()
        before.join()
        if b"response.incomplete" not in before.events[-1]:
            return response_id, before
    raise AssertionError("The model always finished before the kill.")


def test_stream_continues_after_the_crash(start: Callable[[], KillableServer]) -> None:
    response_id, before = kill_midway(start)
    server = start()
    after = StreamReader(server, response_id, after=before.last)
    after.join()
    events = server.read(response_id)
    assert before.events + after.events == events
    assert [json.loads(event)["sequence_number"] for event in events] == list(range(len(events)))
    stored = server.ask("GET", f"/v1/responses/{response_id}")
    assert json.loads(codec.encode(fold(map(codec.decode_event, events)))) == stored
    assert (stored["error"], stored["incomplete_details"]) == (None, {"reason": "max_output_tokens"})
