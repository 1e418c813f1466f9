"""Measure the server against a minimal skeleton, its state features against the same work without them, and the agents,
the bridge and the background queue against alternatives. README.md in this folder explains the figures.

    python -m benchmarks [--quick] [--only PART] [--json FILE] [--record]

CPU time is the most reliable figure: it is the server process's own time, all threads together, and its ratio to the
skeleton comes from the same run. Wall-clock times depend on the load of the machine.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks import (
    agents,
    bridge,
    chains,
    code,
    codec_steps,
    crashes,
    embedded,
    hosted,
    idle_streams,
    imports,
    nodes,
    page,
    peers,
    queues,
    retrieval,
    rounds,
    rows,
    telemetry,
    websocket,
)
from benchmarks.client import Client, InvalidAnswer
from benchmarks.report import Row, as_json, format_table, make_row
from benchmarks.servers import SERVERS, ProcessFailed, RunningServer, Server, start_server
from benchmarks.workloads import STATEFUL, STORED, WORKLOADS

PARTS = ("servers", "agents", "bridge", "queue", "nodes", "hosted", "code", "embedded", "retrieval")

_SECTION_STEPS = "steps of the translation, µs each"
_SECTION_IMPORTS = "imports, ms (compared with msgspec)"
_SECTION_AGENT_IMPORTS = "imports of an agent, ms"
_SECTION_QUEUE_IMPORTS = "imports: engine and store"


class Effort(NamedTuple):
    """The number of repetitions, and the time limit in seconds."""

    rounds: int
    scale: float
    starts: int
    requests: int
    imports: int
    repeats: int
    idle: int
    seconds: float
    crashes: int
    lease: float
    peers: bool


FULL = Effort(
    rounds=9,
    scale=1,
    starts=5,
    requests=2000,
    imports=7,
    repeats=5000,
    idle=500,
    seconds=110,
    crashes=3,
    # The default of the setting.
    lease=15,
    peers=True,
)
QUICK = Effort(
    rounds=2,
    scale=0.2,
    starts=1,
    requests=200,
    imports=1,
    repeats=500,
    idle=50,
    seconds=60,
    crashes=1,
    lease=0.5,
    peers=False,
)


async def measure_servers(servers: Sequence[Server], effort: Effort, folder: Path) -> tuple[list[Row], list[Row]]:
    """Compare the servers, and our server without and with state."""
    async with asyncio.timeout(effort.seconds), contextlib.AsyncExitStack() as stack:
        started = await measure_starts(servers, effort.starts - 1, folder)
        running: list[RunningServer] = []
        clients: dict[str, Client] = {}
        for server in servers:
            running.append(await stack.enter_async_context(start_server(server, folder / server.name)))
            clients[server.name] = stack.enter_context(contextlib.closing(Client(running[-1].port)))
            started[server.name].append(running[-1].started)
        samples = [("seconds to the first answer", started)]
        samples.append(("resident memory after the start, MB", {each.name: [each.megabytes] for each in running}))
        for each in running:
            await rounds.run_round(each, clients[each.name], STORED._replace(requests=effort.requests))
        name = f"resident memory after {effort.requests:,} requests, MB"
        samples.append((name, {each.name: [each.megabytes] for each in running}))
        for workload in WORKLOADS:
            await rounds.check_equivalence(running, clients, workload)
        found = await rounds.measure(running, clients, WORKLOADS, rounds=effort.rounds, scale=effort.scale)
        name = "resident memory at the end, MB"
        samples.append((name, {each.name: [each.megabytes] for each in running}))
        ours = running[-1]
        stateful = await rounds.measure([ours], clients, STATEFUL, rounds=effort.rounds, scale=effort.scale)
    load = rows.make_load_rows(found, [each.name for each in running]) + rows.make_process_rows(samples)
    return load, rows.make_state_rows(found, stateful, ours.name)


async def measure_starts(servers: Sequence[Server], starts: int, folder: Path) -> dict[str, list[float]]:
    """Return the start times of each server. The servers take turns."""
    seconds: dict[str, list[float]] = {server.name: [] for server in servers}
    for number in range(starts):
        for server in servers:
            async with start_server(server, folder / f"{server.name}-{number}") as running:
                seconds[server.name].append(running.started)
    return seconds


async def measure_all_servers(effort: Effort, folder: Path) -> list[list[Row]]:
    load, state = await measure_servers(SERVERS, effort, folder)
    state += rows.make_chain_rows(await chains.measure(folder, rounds=effort.rounds))
    streams = await idle_streams.measure(SERVERS[-1], folder, streams=effort.idle)
    state += rows.make_idle_rows(streams, effort.idle)
    sockets = await websocket.measure_idle(SERVERS[-1], folder, sockets=effort.idle)
    state.append(rows.make_idle_socket_row(sockets, effort.idle))
    turns = await websocket.measure(SERVERS[-1], folder, repeats=effort.rounds, scale=effort.scale)
    names = [SERVERS[0].name, "antiphon"]
    steps = codec_steps.measure(rounds=effort.rounds, repeats=effort.repeats)
    load += rows.make_pair_rows(_SECTION_STEPS, steps, names)
    load += rows.make_pair_rows(_SECTION_IMPORTS, imports.measure(rounds=effort.imports), names)
    return [load, state, rows.make_socket_rows(turns)]


async def measure_agents(effort: Effort, folder: Path, python: Path | None) -> list[list[Row]]:
    """Measure our agents, and the agents of others if `python` is an interpreter that has them."""
    implementations = [(each, Path(sys.executable)) for each in agents.OURS]
    if python is not None:
        implementations += [(each, python) for each in agents.PEERS]
    costs = await agents.measure(implementations, folder, rounds=effort.rounds, scale=effort.scale)
    compared = [(each, python) for each, python in implementations if each.imports]
    import_rows = [
        make_row(_SECTION_AGENT_IMPORTS, name, imports.measure_time(statements, rounds=effort.imports))
        for name, statements in (
            ("package", {each.name: (python, each.imports[0]) for each, python in compared}),
            ("everything an HTTP agent needs", {each.name: (python, each.imports[-1]) for each, python in compared}),
        )
    ]
    return [rows.make_agent_rows(costs, [each.name for each, _ in implementations]), import_rows]


async def measure_queues(effort: Effort, folder: Path) -> list[list[Row]]:
    costs = await queues.measure(folder, rounds=effort.rounds, scale=effort.scale)
    statements = {each.name: (Path(sys.executable), each.imports) for each in queues.IMPLEMENTATIONS}
    import_rows = [
        make_row(_SECTION_QUEUE_IMPORTS, "time, ms", imports.measure_time(statements, rounds=effort.imports)),
        make_row(_SECTION_QUEUE_IMPORTS, "memory, MB", imports.measure_memory(statements, rounds=effort.imports)),
    ]
    takeovers = await crashes.measure_takeovers(folder, rounds=effort.crashes, lease=effort.lease)
    counts = await crashes.count_lost_and_changed(folder, lease=effort.lease)
    return [
        rows.make_queue_rows(costs),
        import_rows,
        rows.make_takeover_rows(takeovers, effort.lease),
        rows.make_crash_count_rows(counts),
    ]


async def measure_nodes(effort: Effort, folder: Path) -> tuple[list[list[Row]], list[str]]:
    # Each round starts six processes.
    count = max(1, effort.rounds // 3)
    tables, notes = await nodes.measure(
        folder, rounds=count, scale=effort.scale, kills=effort.crashes, lease=effort.lease
    )
    cost, more = await telemetry.measure(folder, rounds=count, scale=effort.scale)
    return [*tables, *([cost] if cost else [])], [*notes, *more, f"nodes: medians of {count} rounds"]


async def measure_embedded(effort: Effort, folder: Path) -> tuple[list[list[Row]], list[str]]:
    if missing := embedded.find_missing():
        return [], [f"embedded: not measured, because {missing}"]
    # A token takes as long as a hundred requests, so there are fewer rounds, and few tokens in a quick run.
    count = max(1, effort.rounds // 3)
    figures = await embedded.measure(folder, rounds=count, scale=effort.scale**2)
    return embedded.make_tables(figures), [f"embedded: medians of {count} rounds"]


async def measure_retrieval(effort: Effort, folder: Path) -> tuple[list[list[Row]], list[str]]:
    if missing := retrieval.find_missing():
        return [], [f"retrieval: not measured, because {missing}"]
    sizes = retrieval.SIZES if effort is FULL else retrieval.QUICK_SIZES
    return await retrieval.measure(folder, sizes=sizes), ["retrieval: one round, searches are medians of 15"]


async def measure(
    parts: Sequence[str], effort: Effort, pythons: Mapping[str, Path | None]
) -> tuple[list[list[Row]], list[str]]:
    """Return the tables of these parts, and notes. `pythons` maps a part to the interpreter of its peers."""
    task = asyncio.current_task()
    assert task is not None
    # The default handler would exit at once and leave the servers running.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tables: list[list[Row]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as name:
        folder = Path(name)
        if "servers" in parts:
            tables += await measure_all_servers(effort, folder)
        if "agents" in parts:
            tables += await measure_agents(effort, folder, pythons["agents"])
        if "bridge" in parts:
            found, notes = await bridge.measure(pythons["bridge"], folder, repeats=effort.rounds, scale=effort.scale)
            tables.append(rows.make_bridge_rows(found))
        if "queue" in parts:
            tables += await measure_queues(effort, folder)
        if "hosted" in parts:
            tables.append(await hosted.measure(folder, rounds=effort.rounds))
            count = max(1, effort.rounds // 3)
            tables.append(await hosted.measure_processes(folder, rounds=count))
            notes.append(f"hosted: medians of {count} rounds for calls to other processes")
        if "code" in parts:
            if missing := code.find_missing():
                notes.append(f"code: not measured, because {missing}")
            else:
                count = max(1, effort.rounds // 3)
                tables.append(await code.measure(folder, rounds=count))
                notes.append(f"code: medians of {count} containers")
        for part, measure_part in (
            ("nodes", measure_nodes),
            ("embedded", measure_embedded),
            ("retrieval", measure_retrieval),
        ):
            if part in parts:
                found_tables, found_notes = await measure_part(effort, folder)
                tables += found_tables
                notes += found_notes
    return tables, notes


def prepare_peers(parts: Sequence[str], effort: Effort) -> tuple[dict[str, Path | None], list[str]]:
    """Return the interpreter of each part, and a note for each that is not available."""
    pythons: dict[str, Path | None] = {}
    notes: list[str] = []
    for part, environment in (("agents", peers.AGENTS), ("bridge", peers.BRIDGE)):
        pythons[part] = None
        if effort.peers and part in parts:
            try:
                pythons[part] = peers.prepare(environment)
            except peers.PeersUnavailable as error:
                notes.append(f"{part}: without peers, because {error}")
    return pythons, notes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Antiphon and compare it with others."
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short run without peers, to check that everything works"
    )
    parser.add_argument("--only", choices=PARTS, metavar="PART", help=f"measure one part: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--record", action="store_true", help="record the figures of PART and show them in docs/benchmarks.md"
    )
    arguments = parser.parse_args()
    if arguments.record and (arguments.quick or not arguments.only):
        parser.error("--record needs --only PART, and records no quick runs")
    if sys.platform != "linux":
        print("The benchmarks need Linux: they read CPU time and memory of processes from /proc.", file=sys.stderr)
        return 2
    effort = QUICK if arguments.quick else FULL
    parts = [arguments.only] if arguments.only else PARTS
    pythons, notes = prepare_peers(parts, effort)
    began = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            tables, more = runner.run(measure(parts, effort, pythons))
    except (InvalidAnswer, ProcessFailed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    except TimeoutError:
        print(f"benchmarks: the servers took more than {effort.seconds:g} seconds.", file=sys.stderr)
        return 1
    notes += more
    notes.append(
        f"medians of {effort.rounds} rounds, alternating, Python {platform.python_version()}, "
        f"{time.monotonic() - began:.0f} seconds"
    )
    print("\n\n".join(map(format_table, tables)), "", *notes, sep="\n")
    rows = as_json([row for table in tables for row in table])
    if arguments.json:
        document = {
            "python": platform.python_version(),
            "effort": effort._asdict(),
            "notes": notes,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.record and not rows:
        print(f"benchmarks: nothing is recorded, because {arguments.only} was not measured.", file=sys.stderr)
        return 1
    if arguments.record:
        page.record(arguments.only, {"recorded": page.describe_machine(), "notes": notes, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
