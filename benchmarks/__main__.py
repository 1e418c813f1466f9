"""Measure the server beside a bare skeleton of the same work, its memory beside the same work without it, and the
agents, the bridge and the queue of background responses beside those of others. README.md in this folder says what the
figures mean.

    python -m benchmarks [--quick] [--only PART] [--json FILE]

CPU time is the figure to trust: it is the server process's own, all threads together, and its ratio to the skeleton's
comes from the same run. Times on the clock depend on what else the machine does.
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

from benchmarks import agents, bridge, chains, crashes, figures, idle, imports, micro, peers, queues, rounds, sockets
from benchmarks.client import BadAnswer, Client
from benchmarks.report import Row, as_json, format_table, make_row
from benchmarks.servers import SERVERS, DidNotStart, Running, Server, run
from benchmarks.workloads import STATEFUL, STORED, WORKLOADS

PARTS = ("servers", "agents", "bridge", "queue")

_SECTION_MICRO = "steps of the translation, µs each"
_SECTION_IMPORTS = "imports, ms (beside the import of msgspec)"
_SECTION_AGENT_IMPORTS = "imports of an agent, ms"
_SECTION_QUEUE_IMPORTS = "imports: the whole engine and its store"


class Effort(NamedTuple):
    """How much is measured, and how long all of it may take."""

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
    # As it is set by default.
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
    """The servers side by side, and ours without state and with it."""
    async with asyncio.timeout(effort.seconds), contextlib.AsyncExitStack() as stack:
        started = await measure_starts(servers, effort.starts - 1, folder)
        running: list[Running] = []
        clients: dict[str, Client] = {}
        for server in servers:
            running.append(await stack.enter_async_context(run(server, folder / server.name)))
            clients[server.name] = stack.enter_context(contextlib.closing(Client(running[-1].port)))
            started[server.name].append(running[-1].started)
        readings = [("seconds to the first answer", started)]
        readings.append(("resident memory after the start, MB", {each.name: [each.megabytes] for each in running}))
        for each in running:
            await rounds.play(each, clients[each.name], STORED._replace(requests=effort.requests))
        name = f"resident memory after {effort.requests:,} requests, MB"
        readings.append((name, {each.name: [each.megabytes] for each in running}))
        for workload in WORKLOADS:
            await rounds.compare(running, clients, workload)
        found = await rounds.measure(running, clients, WORKLOADS, rounds=effort.rounds, scale=effort.scale)
        name = "resident memory at the end, MB"
        readings.append((name, {each.name: [each.megabytes] for each in running}))
        ours = running[-1]
        stateful = await rounds.measure([ours], clients, STATEFUL, rounds=effort.rounds, scale=effort.scale)
    rows = figures.load_rows(found, [each.name for each in running]) + figures.process_rows(readings)
    return rows, figures.state_rows(found, stateful, ours.name)


async def measure_starts(servers: Sequence[Server], starts: int, folder: Path) -> dict[str, list[float]]:
    """Start and stop the servers in turns."""
    seconds: dict[str, list[float]] = {server.name: [] for server in servers}
    for number in range(starts):
        for server in servers:
            async with run(server, folder / f"{server.name}-{number}") as running:
                seconds[server.name].append(running.started)
    return seconds


async def measure_all_servers(effort: Effort, folder: Path) -> list[list[Row]]:
    rows, state = await measure_servers(SERVERS, effort, folder)
    state += figures.chain_rows(await chains.measure(folder, rounds=effort.rounds))
    idle_streams = await idle.measure(SERVERS[-1], folder, streams=effort.idle)
    state += figures.idle_rows(idle_streams, effort.idle)
    idle_sockets = await sockets.measure_idle(SERVERS[-1], folder, sockets=effort.idle)
    state.append(figures.idle_socket_row(idle_sockets, effort.idle))
    turns = await sockets.measure(SERVERS[-1], folder, repeats=effort.rounds, scale=effort.scale)
    names = [SERVERS[0].name, "antiphon"]
    steps = micro.measure(rounds=effort.rounds, repeats=effort.repeats)
    rows += figures.pair_rows(_SECTION_MICRO, steps, names)
    rows += figures.pair_rows(_SECTION_IMPORTS, imports.measure(rounds=effort.imports), names)
    return [rows, state, figures.socket_rows(turns)]


async def measure_agents(effort: Effort, folder: Path, python: Path | None) -> list[list[Row]]:
    """Ours, and with an interpreter that has them those of others."""
    contestants = [(each, Path(sys.executable)) for each in agents.OURS]
    if python is not None:
        contestants += [(each, python) for each in agents.PEERS]
    costs = await agents.measure(contestants, folder, rounds=effort.rounds, scale=effort.scale)
    compared = [(each, python) for each, python in contestants if each.imports]
    loads = [
        make_row(_SECTION_AGENT_IMPORTS, name, imports.compare(statements, rounds=effort.imports))
        for name, statements in (
            ("the package", {each.name: (python, each.imports[0]) for each, python in compared}),
            ("all that an agent over HTTP needs", {each.name: (python, each.imports[-1]) for each, python in compared}),
        )
    ]
    return [figures.agent_rows(costs, [each.name for each, _ in contestants]), loads]


async def measure_queues(effort: Effort, folder: Path) -> list[list[Row]]:
    costs = await queues.measure(folder, rounds=effort.rounds, scale=effort.scale)
    statements = {each.name: (Path(sys.executable), each.imports) for each in queues.CONTESTANTS}
    loads = [
        make_row(_SECTION_QUEUE_IMPORTS, "time, ms", imports.compare(statements, rounds=effort.imports)),
        make_row(_SECTION_QUEUE_IMPORTS, "memory, MB", imports.weigh(statements, rounds=effort.imports)),
    ]
    takeovers = await crashes.measure_takeovers(folder, rounds=effort.crashes, lease=effort.lease)
    fates = await crashes.measure_fates(folder, lease=effort.lease)
    return [
        figures.queue_rows(costs),
        loads,
        figures.takeover_rows(takeovers, effort.lease),
        figures.fate_rows(fates),
    ]


async def measure(
    parts: Sequence[str], effort: Effort, pythons: Mapping[str, Path | None]
) -> tuple[list[list[Row]], list[str]]:
    """The tables of these parts, and notes on them. `pythons` are the interpreters that have those of others."""
    task = asyncio.current_task()
    assert task is not None
    # The default would end this process at once, and leave the servers running.
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
            tables.append(figures.bridge_rows(found))
        if "queue" in parts:
            tables += await measure_queues(effort, folder)
    return tables, notes


def prepare_peers(parts: Sequence[str], effort: Effort) -> tuple[dict[str, Path | None], list[str]]:
    """The interpreters by part, and what has to be said of those that there are none of."""
    pythons: dict[str, Path | None] = {}
    notes: list[str] = []
    for part, environment in (("agents", peers.AGENTS), ("bridge", peers.BRIDGE)):
        pythons[part] = None
        if effort.peers and part in parts:
            try:
                pythons[part] = peers.prepare(environment)
            except peers.Missing as error:
                notes.append(f"{part}: our figures alone, because {error}")
    return pythons, notes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Antiphon beside others.")
    parser.add_argument("--quick", action="store_true", help="measure little, and nobody else's: to see that it works")
    parser.add_argument("--only", choices=PARTS, metavar="PART", help=f"measure one part: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        print("The benchmarks read the CPU time and memory of processes the way Linux has them.", file=sys.stderr)
        return 2
    effort = QUICK if arguments.quick else FULL
    parts = [arguments.only] if arguments.only else PARTS
    pythons, notes = prepare_peers(parts, effort)
    began = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            tables, more = runner.run(measure(parts, effort, pythons))
    except (BadAnswer, DidNotStart) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    except TimeoutError:
        print(f"benchmarks: more than {effort.seconds:g} seconds for the servers is too long.", file=sys.stderr)
        return 1
    notes += more
    notes.append(
        f"medians of {effort.rounds} rounds in turns, Python {platform.python_version()}, "
        f"{time.monotonic() - began:.0f} seconds"
    )
    print("\n\n".join(map(format_table, tables)), "", *notes, sep="\n")
    if arguments.json:
        rows = as_json([row for table in tables for row in table])
        document = {"python": platform.python_version(), "effort": effort._asdict(), "notes": notes, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
