"""Hosted calls of background responses after SIGKILL: none is run twice, and events already sent stay valid."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.serve.hosted.call_runner import UNKNOWN_OUTCOME
from antiphon.protocol import codec
from antiphon.protocol.response import FINAL_STATUSES
from antiphon.stream.fold import fold
from support.crashing_server import KillableServer, StreamReader, wait_until
from support.hosted_tool import install

# For each point of the kill: the queries of the model's calls, and how often each takes effect.
POINTS: dict[str, dict[str, int]] = {
    "early": {"early": 1},
    "before": {"before": 0},
    "after": {"after": 1},
    "after-repeatable": {"after-repeatable": 2},
    "between": {"between": 1},
    "first": {"first": 1, "before-second": 0},
}


def make_call(query: str) -> dict[str, Any]:
    return {"tool_call": {"name": "record", "arguments": {"queries": [query]}}}


def make_script(life: int) -> dict[str, Any]:
    """Return the script of the server's first or second life. In the first, some answers never end."""
    waits = [{"wait": "for ever"}] if life == 1 else []
    rules: list[dict[str, Any]] = [
        {
            "last_item": "function_call_output",
            "user": "between",
            "answers": [[{"text": ["Do"]}, *waits, {"text": "ne."}]],
        },
        {"last_item": "function_call_output", "answers": ["Done."]},
    ]
    for readers in ("unwatched", "watched"):
        for point, queries in POINTS.items():
            calls = [make_call(f"{query}-{readers}") for query in queries]
            answer = [*calls, *waits] if point == "early" else calls
            rules.append({"user": f"{point}-{readers}", "answers": [answer]})
    return {"native_tools": ["function"], "rules": rules}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[KillableServer]]:
    started: list[KillableServer] = []
    yield started
    for server in started:
        server.kill()


def count_steps(folder: Path, response_id: str) -> int:
    with closing(sqlite3.connect(folder / "store.db")) as connection:
        query = "SELECT count(*) FROM hosted_steps WHERE response_id = ?"
        (count,) = connection.execute(query, (response_id,)).fetchone()
        return int(count)


def test_killed_server_runs_no_call_twice_and_ends_every_response(
    tmp_path: Path, servers: list[KillableServer]
) -> None:
    env = install(tmp_path)
    (tmp_path / "hold").touch()
    servers.append(KillableServer(tmp_path, make_script(1), env=env, background_lease_seconds=0.5))
    names = [f"{point}-{readers}" for point in POINTS for readers in ("watched", "unwatched")]
    ids = {name: servers[0].start_background(name, tools=[{"type": "record"}]) for name in names}
    readers = {name: StreamReader(servers[0], ids[name]) for name in names if name.endswith("-watched")}
    readers["early-watched"].wait_for(b"response.record_call.in_progress")
    readers["between-watched"].wait_for(b'"Do"')
    readers["first-watched"].wait_for(b'"output_index":1')
    for held in ("before", "after", "after-repeatable", "before-second"):
        for suffix in ("watched", "unwatched"):
            wait_until((tmp_path / f"held-{held}-{suffix}").exists)
    readers["after-watched"].wait_for(b"response.record_call.completed")
    wait_until(lambda: count_steps(tmp_path, ids["between-unwatched"]) == 3)
    servers[0].kill()
    (tmp_path / "hold").unlink()
    for reader in readers.values():
        reader.join()

    servers.append(KillableServer(tmp_path, make_script(2), env=env, background_lease_seconds=0.5))
    server = servers[1]
    for name in names:
        wait_until(lambda name=name: server.status(ids[name]) in FINAL_STATUSES)  # type: ignore[misc]
    effects = (tmp_path / "effects").read_text().split()
    for name in names:
        point, _, suffix = name.rpartition("-")
        log = server.read(ids[name])
        if name in readers:
            shown = readers[name].events
            assert log[: len(shown)] == shown, name
        assert [json.loads(event)["sequence_number"] for event in log] == list(range(len(log)))
        response = fold([codec.decode_event(event) for event in log])
        calls = [json.loads(item.raw) for item in response.output[:-1]]  # type: ignore[union-attr]
        assert (name, response.status, response.output_text) == (name, "completed", "Done.")
        assert server.ask("GET", f"/v1/responses/{ids[name]}")["output"] == json.loads(codec.encode(response.output))
        for call, (query, count) in zip(calls, POINTS[point].items(), strict=True):
            assert (query, effects.count(f"{query}-{suffix}")) == (query, count)
            is_unknown = query.startswith(("before", "after")) and "repeatable" not in query
            if is_unknown:
                assert (call["status"], call["texts"]) == ("failed", [UNKNOWN_OUTCOME])
            else:
                assert (call["status"], call["queries"]) == ("completed", [f"{query}-{suffix}"])
        assert count_steps(tmp_path, ids[name]) == 0
