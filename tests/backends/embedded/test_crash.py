"""kill -9 while the embedded model speaks: it says the same again, and whoever has read its words reads on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.protocol import codec
from antiphon.stream.fold import fold
from support.crashing_server import KillableServer, StreamReader

WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 200}
SCHEMA = {"type": "object", "properties": {"words": WORDS}, "required": ["words"], "additionalProperties": False}
# The hotter a model is, the sooner it would say something else. The schema keeps it from ending too soon.
ASKED = {
    "model": "smollm2-135m",
    "input": "Which words do you know?",
    "text": {"format": {"type": "json_schema", "name": "words", "schema": SCHEMA}},
    "temperature": 1,
    "max_output_tokens": 60,
    "background": True,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], KillableServer]]:
    started: list[KillableServer] = []

    def start_server() -> KillableServer:
        # A reader counts the events, which silence must not add to.
        settings = {"background_lease_seconds": 0.5, "keepalive_seconds": 600}
        started.append(KillableServer(tmp_path, {}, **settings, **{"backends.embedded.kind": "embedded"}))
        return started[-1]

    yield start_server
    for server in started:
        server.kill()


def break_off(start: Callable[[], KillableServer]) -> tuple[str, StreamReader]:
    """A response whose model was killed in the middle of it, and what of it was seen."""
    for _ in range(5):  # a quick model comes to its end first if this process stands still
        server = start()
        response_id = server.ask("POST", "/v1/responses", ASKED)["id"]
        before = StreamReader(server, response_id)
        before.wait_for(b'"sequence_number":20')
        server.kill()
        before.join()
        if b"response.incomplete" not in before.events[-1]:
            return response_id, before
    raise AssertionError("it was always too late")


def test_a_watched_stream_goes_on_after_the_crash(start: Callable[[], KillableServer]) -> None:
    response_id, before = break_off(start)
    server = start()
    after = StreamReader(server, response_id, after=before.last)
    after.join()
    told = server.read(response_id)
    assert before.events + after.events == told
    assert [json.loads(event)["sequence_number"] for event in told] == list(range(len(told)))
    stored = server.ask("GET", f"/v1/responses/{response_id}")
    assert json.loads(codec.encode(fold(map(codec.decode_event, told)))) == stored
    assert (stored["error"], stored["incomplete_details"]) == (None, {"reason": "max_output_tokens"})
