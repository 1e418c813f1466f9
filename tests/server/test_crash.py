"""kill -9: what was accepted is ended, and what was shown stays true."""

import contextlib
import http.client
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.protocol import codec
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.stream.fold import fold
from support.crashing_server import TIMEOUT, KillableServer, StreamReader, read_events, wait_until

Start = Callable[..., KillableServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[KillableServer] = []

    def start_server(script: dict[str, Any], **settings: Any) -> KillableServer:
        started.append(KillableServer(tmp_path, script, **settings))
        return started[-1]

    yield start_server
    for server in started:
        server.kill()


def speak(words: list[str], *, slowly: float, to_the_end: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for word in words:
        steps += [{"text": [word]}, {"delay": slowly}]
    return steps if to_the_end else [*steps, {"wait": "for ever"}]


def call(words: list[str], *, slowly: float, to_the_end: bool) -> list[dict[str, Any]]:
    """The same words, some of them thought, some in the arguments of two calls at once."""
    steps: list[dict[str, Any]] = []
    for number, word in enumerate(words):
        half = {"name": "look", "key": number % 2, "call_id": f"call_{number % 2}", "arguments": [word]}
        steps += [{"reasoning": [word]} if number < 5 else {"tool_call": half}, {"delay": slowly}]
    return steps if to_the_end else [*steps, {"wait": "for ever"}]


def make_script(life: int) -> dict[str, Any]:
    """What the model says in the server's first, second and third life: further each time, but only then to the end."""
    counted = [f" w{number}." for number in range(20 + 10 * life)]
    changing = [f" w{number}, in life {life}." for number in range(20 + 10 * life)]
    manner: dict[str, Any] = {"slowly": 0.02, "to_the_end": life == 3}
    return {
        "rules": [
            {"user": "repeat", "answers": [speak(counted, **manner)]},
            {"user": "change", "answers": [speak(changing, **manner)]},
            {"user": "call", "answers": [call(counted, **manner)]},
        ]
    }


# What is asked, and in which of the server's lives somebody watches.
KINDS = [("repeat", {1, 2}), ("repeat", set()), ("change", {1}), ("change", set()), ("call", {2})]


def test_fifty_background_responses_end_well_though_the_server_is_killed_twice(start: Start) -> None:
    settings = {"background_slots": 60, "background_lease_seconds": 0.5}
    server = start(make_script(1), **settings)
    asked = [KINDS[number % len(KINDS)] for number in range(50)]
    responses = {server.start_background(words): (words, watched) for words, watched in asked}
    readers: dict[str, list[StreamReader]] = defaultdict(list)
    # What the second life is waited for, the first one has not said, however long it lived.
    for life, marker in ((1, b" w8"), (2, b" w35")):
        for response_id, (_, watched) in responses.items():
            if life in watched:
                earlier = readers[response_id][-1].last if readers[response_id] else None
                readers[response_id].append(StreamReader(server, response_id, after=earlier))
        for reader in (each for found in readers.values() for each in found[-1:]):
            if life in responses[reader.response_id][1]:
                reader.wait_for(marker)
        server.kill()
        for reader in (each for found in readers.values() for each in found):
            reader.join()
        server = start(make_script(life + 1), **settings)
    # Asking for a response is not watching it.
    wait_until(lambda: all(server.status(response_id) in FINAL_STATUSES for response_id in responses))
    for response_id, (words, watched) in responses.items():
        told = server.read(response_id)
        final = check_stream(told)
        shown = [event for reader in readers[response_id] for event in reader.events]
        assert shown == told[: len(shown)]
        diverged = words == "change" and watched
        assert (final["status"], (final["error"] or {}).get("code")) == (
            ("failed", "interrupted") if diverged else ("completed", None)
        )
        assert final == server.ask("GET", f"/v1/responses/{response_id}")


def check_stream(told: list[bytes]) -> dict[str, Any]:
    """The numbers have no gap, and the events are a legal stream. Gives the response they end with."""
    assert [json.loads(event)["sequence_number"] for event in told] == list(range(len(told)))
    response = fold(codec.decode_event(event) for event in told)
    final: dict[str, Any] = json.loads(codec.encode(response))
    assert final == json.loads(told[-1])["response"]
    return final


def test_a_response_that_was_only_queued_is_run_after_the_crash(start: Start) -> None:
    settings = {"background_slots": 1, "background_lease_seconds": 0.1}
    script = {"rules": [{"user": "block", "answers": [[{"wait": "for ever"}]]}]}
    server = start(script, **settings)
    blocking, waiting = server.start_background("block"), server.start_background("hello")
    server.kill()
    server = start({"default": "at last: {input}"}, **settings)
    for response_id, text in ((blocking, "at last: block"), (waiting, "at last: hello")):
        assert check_stream(server.read(response_id))["output"][0]["content"][0]["text"] == text


def test_a_second_server_leaves_the_first_one_its_runs_until_that_dies(start: Start) -> None:
    """And it cancels what the first one works on, through the store they share."""
    settings = {"background_lease_seconds": 2}
    slow = speak([" first"] * 6, slowly=0.5, to_the_end=True)  # longer than a lease
    script = {"rules": [{"user": "slow", "answers": [slow]}, {"user": "block", "answers": [[{"wait": "for ever"}]]}]}
    first = start(script, **settings)
    slowly, unwanted, orphaned = (
        first.start_background("slow"),
        first.start_background("block"),
        first.start_background("block"),
    )
    wait_until(lambda: first.status(orphaned) == "in_progress")
    second = start({"default": "second"}, **settings)
    reader = StreamReader(second, slowly)
    assert second.ask("POST", f"/v1/responses/{unwanted}/cancel")["status"] == "cancelled"
    reader.join()
    assert check_stream(reader.events)["output"][0]["content"][0]["text"] == " first" * 6
    assert first.status(orphaned) == "in_progress"
    first.kill()
    wait_until(lambda: second.status(orphaned) == "completed")
    assert check_stream(second.read(orphaned))["output"][0]["content"][0]["text"] == "second"


def test_two_servers_share_the_limits_and_the_second_takes_over(start: Start) -> None:
    settings = {"background_lease_seconds": 2, "background_concurrency": 1, "background_starts_per_minute": 2}
    script = {"rules": [{"user": "block", "answers": [[{"wait": "for ever"}]]}], "default": "done"}
    first = start(script, **settings)
    blocking = first.start_background("block")
    wait_until(lambda: first.status(blocking) == "in_progress")
    second = start({"default": "second"}, **settings)
    waiting, late = second.start_background("wait"), second.start_background("late")
    # Two checks of the queue by the second server: it ends a cancelled run, which needs no slot, and starts no other.
    for _ in range(2):
        cancelled = second.start_background("cancel")
        assert second.ask("POST", f"/v1/responses/{cancelled}/cancel")["status"] == "cancelled"
    assert [second.status(each) for each in (blocking, waiting, late)] == ["in_progress", "queued", "queued"]
    first.kill()
    for response_id in (blocking, waiting):
        assert check_stream(second.read(response_id))["output"][0]["content"][0]["text"] == "second"
    # The takeover was no start, and the two starts of this minute are used up.
    assert second.status(late) == "queued"


def test_a_server_without_the_model_leaves_the_runs_of_a_dead_one_to_whoever_has_it(start: Start) -> None:
    settings = {"background_lease_seconds": 10}  # four of them are longer than any start takes
    first = start({"default": [{"text": ["so "]}, {"wait": "for ever"}]}, **settings)
    response_id = first.start_background("hi")
    wait_until(lambda: first.status(response_id) == "in_progress")
    second = start({"models": ["another"]}, **settings)
    first.kill()
    # Whoever has worked off what came later has seen what was left.
    later = second.ask("POST", "/v1/responses", {"model": "another", "input": "hi", "background": True})["id"]
    wait_until(lambda: second.status(later) == "completed")
    assert second.status(response_id) == "in_progress"
    third = start({"default": "so it goes"}, **settings)
    assert check_stream(third.read(response_id))["output"][0]["content"][0]["text"] == "so it goes"


def test_a_stream_that_died_with_its_server_leaves_nothing_unfinished(start: Start) -> None:
    script = {"default": [{"text": "first "}, {"wait": "for ever"}]}
    server = start(script)
    conversation = server.ask("POST", "/v1/conversations", {})["id"]
    body = {"model": "scripted", "input": "hi", "stream": True, "conversation": conversation}
    connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/responses", json.dumps(body))
        events = read_events(connection.getresponse())
        response_id = json.loads(next(events))["response"]["id"]
        while b'"first' not in next(events):
            pass
        server.kill()
    server = start(script)
    assert server.ask("GET", f"/v1/responses/{response_id}")["error"]["param"] == "response_id"
    assert server.ask("GET", f"/v1/conversations/{conversation}/items")["data"] == []
