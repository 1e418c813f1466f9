"""Compare our server with other servers of the Responses API, on one upstream, side by side.

    python -m benchmarks.side_by_side [--quick] [--minutes N] [--server NAME] [--json FILE]

Installs the other servers into `.peers`, measures, and writes the figures to benchmarks/figures.json and the pages that
show them. docs/benchmarks.md explains the figures.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks import page, peers
from benchmarks.servers import ProcessFailed, RunningServer, Server, start_server
from benchmarks.side_by_side import upstream as upstream_module
from benchmarks.side_by_side.load import Effort, Measured, Target, open_target
from benchmarks.side_by_side.models import CHAIN
from benchmarks.side_by_side.servers import (
    ANTIPHON,
    ANTIPHON_RESPONSES,
    PEERS,
    Peer,
    measure_installed_size,
    read_version,
)
from benchmarks.side_by_side.works import WORKS, Work

DIRECT = "direct"
FULL = Effort(rounds=3, round_seconds=1.2, budget=10)
QUICK = Effort(rounds=1, round_seconds=0.1, budget=1)


class Installed(NamedTuple):
    """A server that can be started with this interpreter."""

    peer: Peer
    python: Path


def install(candidates: Sequence[Peer]) -> tuple[list[Installed], dict[str, str]]:
    """Return the servers that can be installed, and the reasons against the others."""
    installed: list[Installed] = []
    reasons: dict[str, str] = {}
    for peer in candidates:
        try:
            python = peers.prepare(peer.environment) if peer.environment else Path(sys.executable)
            installed.append(Installed(peer, python))
        except peers.PeersUnavailable as error:
            reasons[peer.name] = f"not installed: {error}"
    return installed, reasons


def share_cores() -> tuple[Collection[int], str]:
    """Reserve one core for the servers, and leave the others to the upstream and the client. Return it, and a note."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or shutil.which("taskset") is None:
        return (), "servers, upstream and client share all cores"
    os.sched_setaffinity(0, cores[1:])
    return cores[:1], "every server runs on a core of its own; upstream and client run on the others"


async def start_all(
    installed: Sequence[Installed],
    upstream: RunningServer,
    folder: Path,
    cores: Collection[int],
    stack: contextlib.AsyncExitStack,
    reasons: dict[str, str],
) -> tuple[list[Target], dict[str, dict[str, float]]]:
    """Start every server. Return the running ones, and start time, idle memory and size of each."""
    targets: list[Target] = []
    processes: dict[str, dict[str, float]] = {}
    for peer, python in installed:
        try:
            own_folder = folder / peer.name
            # The first start fills the file cache and compiles modules.
            first = peer.make_server(python, upstream.port, own_folder.with_suffix(".first"), cores)
            async with start_server(first, own_folder.with_suffix(".first")):
                pass
            server = peer.make_server(python, upstream.port, own_folder, cores)
            running = await stack.enter_async_context(start_server(server, own_folder))
        except (ProcessFailed, OSError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            reasons[peer.name] = f"did not start: {lines[-1].strip()[:300]}"
            continue
        targets.append(stack.enter_context(open_target(peer.name, running.port, running.pid, peer)))
        processes[peer.name] = {
            "start": running.started,
            "idle": targets[-1].process.megabytes,
            "installed": measure_installed_size(peer, python),
        }
    return targets, processes


def make_measured(work: Work, target: Target, peer: Peer | None) -> Measured:
    measured = Measured(work, target)
    if peer is None and (work.websocket or work.model == CHAIN):
        measured.reason = "the upstream has no such work"
    for need in work.needs if peer else ():
        if peer and need in peer.unsupported:
            measured.reason = peer.unsupported[need]
    return measured


async def measure_works(targets: Sequence[Target], effort: Effort, works: Sequence[Work], until: float) -> list[Any]:
    """Measure every work on every server. The servers take turns, round by round."""
    by_name = {peer.name: peer for peer in PEERS}
    found = []
    for work in works:
        print(f"  {format_work(work)}", file=sys.stderr, flush=True)
        measured = {target.name: make_measured(work, target, by_name.get(target.name)) for target in targets}
        for _ in range(effort.rounds):
            for each in measured.values():
                if time.monotonic() < until:
                    await each.run(effort)
        found.append(work._asdict() | {"servers": {name: each.summarize() for name, each in measured.items()}})
    return found


def format_work(work: Work) -> str:
    return f"{work.name}, {'stored' if work.store else 'not stored'}, {work.concurrency} at once"


async def measure(
    installed: Sequence[Installed], effort: Effort, works: Sequence[Work], minutes: float, reasons: dict[str, str]
) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    # The default handler would exit at once and leave the servers running.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.monotonic()
    cores, note = share_cores()
    with tempfile.TemporaryDirectory(prefix="antiphon-peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(start_server(_UPSTREAM, folder / "upstream"))
            targets, processes = await start_all(installed, upstream, folder, cores, stack, reasons)
            direct = stack.enter_context(open_target(DIRECT, upstream.port, upstream.pid, None))
            found = await measure_works([direct, *targets], effort, works, began + minutes * 60)
            for target in targets:
                with contextlib.suppress(OSError):
                    processes[target.name]["loaded"] = target.process.megabytes
    return {
        "recorded": page.describe_machine(),
        "seconds": round(time.monotonic() - began),
        "rounds": effort.rounds,
        "cores": note,
        "missing": reasons,
        "versions": {peer.name: read_version(peer, python) for peer, python in installed},
        "processes": processes,
        "works": found,
    }


def _prepare_upstream(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", upstream_module.__name__, str(port)]


_UPSTREAM = Server("upstream", "/", _prepare_upstream)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description="Compare Antiphon with other servers."
    )
    parser.add_argument("--quick", action="store_true", help="a short run without other servers; records nothing")
    parser.add_argument("--minutes", type=float, default=14, help="begin no round after this time (default: 14)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE instead of recording them")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--server", action="append", choices=names, help="measure only these; records nothing")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        print("The benchmarks need Linux: they read CPU time and memory of processes from /proc.", file=sys.stderr)
        return 2
    candidates: Sequence[Peer] = (ANTIPHON, ANTIPHON_RESPONSES) if arguments.quick else PEERS
    if arguments.server:
        candidates = [peer for peer in PEERS if peer.name in arguments.server]
    installed, reasons = install(candidates)
    effort = QUICK if arguments.quick else FULL
    works = tuple(dict.fromkeys(work._replace(concurrency=2) for work in WORKS)) if arguments.quick else WORKS
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(measure(installed, effort, works, arguments.minutes, reasons))
    except ProcessFailed as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    print(page.format_peers(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    elif not arguments.quick and not arguments.server:
        page.record("peers", figures)
    # Our own server must not fail.
    ours = [each["servers"].get(name, {}) for each in figures["works"] for name in ("Antiphon", "Antiphon (R)")]
    return int(any(str(each.get("reason", "")).startswith("failed") for each in ours) or ANTIPHON.name in reasons)


if __name__ == "__main__":
    sys.exit(main())
