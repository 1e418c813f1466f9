"""Crash recovery: after SIGKILL accepted responses are completed, and events already sent stay valid."""

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
# Longer than a busy machine stops a server: the lease of a server that lives must not expire.
LEASE = 6


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[KillableServer] = []

    def start_server(script: dict[str, Any], **settings: Any) -> KillableServer:
        started.append(KillableServer(tmp_path, script, **settings))
        return started[-1]

    yield start_server
    for server in started:
        server.kill()


def make_text_steps(words: list[str], *, delay: float, ends: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for word in words:
        steps += [{"text": [word]}, {"delay": delay}]
    return steps if ends else [*steps, {"wait": "for ever"}]


def make_call_steps(words: list[str], *, delay: float, ends: bool) -> list[dict[str, Any]]:
    """Emit some of the words as reasoning, and the others in the arguments of two parallel calls."""
    steps: list[dict[str, Any]] = []
    for number, word in enumerate(words):
        half = {"name": "look", "key": number % 2, "call_id": f"call_{number % 2}", "arguments": [word]}
        steps += [{"reasoning": [word]} if number < 5 else {"tool_call": half}, {"delay": delay}]
    return steps if ends else [*steps, {"wait": "for ever"}]


def make_script(life: int) -> dict[str, Any]:
    """Return the script of the server's first, second or third life. The model ends only in the third."""
    counted = [f" w{number}." for number in range(20 + 10 * life)]
    changing = [f" w{number}, in life {life}." for number in range(20 + 10 * life)]
    options: dict[str, Any] = {"delay": 0.02, "ends": life == 3}
    return {
        "rules": [
            {"user": "repeat", "answers": [make_text_steps(counted, **options)]},
            {"user": "change", "answers": [make_text_steps(changing, **options)]},
            {"user": "call", "answers": [make_call_steps(counted, **options)]},
        ]
    }


# The input, and the lives of the server in which a reader follows the response.
KINDS = [("repeat", {1, 2}), ("repeat", set()), ("change", {1}), ("change", set()), ("call", {2})]


@pytest.mark.slow
def test_fifty_background_responses_survive_two_kills(start: Start) -> None:
    settings = {"background_slots": 60, "background_lease_seconds": 0.5}
    server = start(make_script(1), **settings)
    requests = [KINDS[number % len(KINDS)] for number in range(50)]
    responses = {server.start_background(words): (words, watched) for words, watched in requests}
    readers: dict[str, list[StreamReader]] = defaultdict(list)
    # The marker of the second life is beyond the last word of the first.
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
    # A status request does not count as a reader.
    wait_until(lambda: all(server.status(response_id) in FINAL_STATUSES for response_id in responses))
    for response_id, (words, watched) in responses.items():
        events = server.read(response_id)
        final = check_stream(events)
        received = [event for reader in readers[response_id] for event in reader.events]
        assert received == events[: len(received)]
        diverged = words == "change" and watched
        assert (final["status"], (final["error"] or {}).get("code")) == (
            ("failed", "interrupted") if diverged else ("completed", None)
        )
        assert final == server.ask("GET", f"/v1/responses/{response_id}")


def check_stream(events: list[bytes]) -> dict[str, Any]:
    """Check that the sequence numbers have no gap and the events are a valid stream. Return the final response."""
    assert [json.loads(event)["sequence_number"] for event in events] == list(range(len(events)))
    response = fold(codec.decode_event(event) for event in events)
    final: dict[str, Any] = json.loads(codec.encode(response))
    assert final == json.loads(events[-1])["response"]
    return final


def test_queued_response_runs_after_the_crash(start: Start) -> None:
    settings = {"background_slots": 1, "background_lease_seconds": 0.1}
    script = {"rules": [{"user": "block", "answers": [[{"wait": "for ever"}]]}]}
    server = start(script, **settings)
    blocking, waiting = server.start_background("block"), server.start_background("hello")
    server.kill()
    server = start({"default": "at last: {input}"}, **settings)
    for response_id, text in ((blocking, "at last: block"), (waiting, "at last: hello")):
        assert check_stream(server.read(response_id))["output"][0]["content"][0]["text"] == text


def test_second_server_claims_runs_only_after_the_first_dies(start: Start) -> None:
    """The second server can cancel a run of the first one through the shared store."""
    settings = {"background_lease_seconds": LEASE}
    slow = make_text_steps([" first"] * (LEASE + 1), delay=1, ends=True)  # longer than a lease
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
    assert check_stream(reader.events)["output"][0]["content"][0]["text"] == " first" * (LEASE + 1)
    assert first.status(orphaned) == "in_progress"
    first.kill()
    wait_until(lambda: second.status(orphaned) == "completed")
    assert check_stream(second.read(orphaned))["output"][0]["content"][0]["text"] == "second"


def test_two_servers_share_limits_and_the_second_takes_over(start: Start) -> None:
    settings = {"background_lease_seconds": LEASE, "background_concurrency": 1, "background_starts_per_minute": 2}
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


def test_server_without_the_model_leaves_runs_to_one_that_has_it(start: Start) -> None:
    settings = {"background_lease_seconds": 10}  # four lease periods are longer than any server start
    first = start({"default": [{"text": ["so "]}, {"wait": "for ever"}]}, **settings)
    response_id = first.start_background("hi")
    wait_until(lambda: first.status(response_id) == "in_progress")
    second = start({"models": ["another"]}, **settings)
    first.kill()
    # A server that has completed a later run has seen the earlier one.
    later = second.ask("POST", "/v1/responses", {"model": "another", "input": "hi", "background": True})["id"]
    wait_until(lambda: second.status(later) == "completed")
    assert second.status(response_id) == "in_progress"
    third = start({"default": "so it goes"}, **settings)
    assert check_stream(third.read(response_id))["output"][0]["content"][0]["text"] == "so it goes"


def test_killed_stream_leaves_no_unfinished_response(start: Start) -> None:
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
