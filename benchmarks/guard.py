"""Guard against slower code: count the work of a request and compare it with the committed baseline.

    python -m benchmarks.guard [--update] [--kind perf|callgrind|calls]

Counts do not depend on the load of the machine. Instructions are counted by the processor, or else by callgrind. They
depend on the build of Python, so the baseline of another build does not apply. Calls of functions depend on the minor
version of Python only, and can be counted everywhere. The exit status is 1 if a count is more than 10 % above its
baseline. README.md in this folder explains the rows.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import platform
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import uvloop

from benchmarks import upstream
from benchmarks.client import HOST, Client, InvalidAnswer, post
from benchmarks.counters import CounterUnavailable, PerfCounter, make_valgrind_command
from benchmarks.servers import ProcessFailed, find_free_port, make_environment
from benchmarks.workloads import ANSWERS, TEN_ITEMS, Workload, make_tools

BASELINES = Path(__file__).with_name("guard.json")
KINDS = ("perf", "callgrind", "calls")
UNITS = {"perf": "instructions", "callgrind": "instructions", "calls": "calls"}
LIMIT = 0.10
KEY = "sk-" + "0" * 60
# All tokens in one read: the number of reads must not depend on the load of the machine.
STREAM_MODEL = "one-read"
STREAM_TOKENS = ANSWERS["long"][:40]
REQUEST = Workload(
    "request", "long", TEN_ITEMS, stream=False, store=True, concurrency=1, requests=1, key=KEY, tools=make_tools(3)
)
STREAM = REQUEST._replace(name="stream", model=STREAM_MODEL, stream=True)
WARM_UP = 10
REPEATS = 10
_SECONDS = 600.0

Counts = Mapping[str, float]


class Choice(NamedTuple):
    """The counter to use, with its baseline."""

    kind: str
    baseline: Counts


def make_baseline_name(kind: str) -> str:
    """Return the name of the baseline for this kind of counter on this machine."""
    major, minor, _ = platform.python_version_tuple()
    if kind == "calls":
        return f"calls, {platform.python_implementation()} {major}.{minor}"
    build = f"{platform.python_compiler()} {sysconfig.get_config_var('CONFIG_ARGS')}"
    digest = hashlib.sha256(build.encode()).hexdigest()[:8]
    return f"{kind}, {platform.python_implementation()} {platform.python_version()} {platform.machine()} build {digest}"


def check_counter(kind: str) -> None:
    """Raise CounterUnavailable if this machine lacks the counter."""
    if kind == "perf":
        PerfCounter()
    elif kind == "callgrind":
        make_valgrind_command(Path())


def choose(kinds: Sequence[str], baselines: Mapping[str, Counts]) -> tuple[Choice | None, list[str]]:
    """Return the first counter that this machine has and that has a baseline, and the reasons against the others."""
    reasons: list[str] = []
    for kind in kinds:
        try:
            check_counter(kind)
        except CounterUnavailable as error:
            reasons.append(f"{kind}: not available ({error})")
            continue
        name = make_baseline_name(kind)
        if name in baselines:
            return Choice(kind, baselines[name]), reasons
        reasons.append(f"{kind}: no baseline for {name}; ARGS=--update records one")
    return None, reasons


async def measure(
    kind: str,
    folder: Path,
    requests: int,
    *,
    warm_up: int = WARM_UP,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the counts of every row. `environment` has further variables of the counted process."""
    async with start_upstream() as upstream_port:
        port = find_free_port()
        # The watchdog and leases work by the clock: on a slow machine, more of this would count for a request.
        (folder / "antiphon.toml").write_text(
            f'data_dir = "{folder}"\nlog_block_ms = 0\nbackground_lease_seconds = 3600\n[[api_keys]]\nkey = "{KEY}"\n'
            '[backends.chat]\nkind = "chat_completions"\n'
            f'base_url = "http://{HOST}:{upstream_port}/v1"\nmodels = ["{REQUEST.model}", "{STREAM.model}"]\n'
        )
        ours, theirs = socket.socketpair()
        prefix = make_valgrind_command(folder) if kind == "callgrind" else []
        command = [*prefix, sys.executable, "-m", "benchmarks.guard_worker", kind, str(theirs.fileno())]
        command += [str(folder / "antiphon.toml"), str(port)]
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=make_environment(folder) | {"PYTHONHASHSEED": "0"} | dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        try:
            async with asyncio.timeout(_SECONDS):
                return await _count(ours, port, requests, warm_up)
        except (TimeoutError, OSError, ValueError) as error:
            tail = (folder / "log").read_text(errors="replace")[-4000:]
            raise ProcessFailed(f"the counted process failed ({error!r}):\n{tail}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def start_upstream() -> AsyncIterator[int]:
    """Yield the port of an upstream that answers `REQUEST` and `STREAM`."""
    answers = upstream.prepare_answers()
    pair = upstream.make_chat_answers(STREAM_MODEL, [[piece for pieces in STREAM_TOKENS for piece in pieces]])
    answers |= {("/v1/chat/completions", STREAM_MODEL, 0, not whole): pair[whole] for whole in (False, True)}
    server = await asyncio.get_running_loop().create_server(lambda: upstream.Connection(answers), HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _count(control: socket.socket, port: int, requests: int, warm_up: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection(sock=control)
    with contextlib.closing(writer), contextlib.closing(Client(port)) as client:
        counts: dict[str, float] = json.loads(await reader.readline())
        for workload in (REQUEST, STREAM):
            await _send(client, workload, warm_up)
            writer.write(b"start\n")
            await reader.readline()
            await _send(client, workload, requests)
            writer.write(b"stop\n")
            counts[workload.name] = int(await reader.readline()) / requests
        return counts


async def _send(client: Client, workload: Workload, times: int) -> None:
    answers = await client.load(post(workload.body, key=KEY), count=times, concurrency=1, seconds=_SECONDS)
    for answer in answers:
        if answer.status != 200 or b'"status":"completed"' not in answer.body:
            raise InvalidAnswer(f"{workload.name}: {answer.head + answer.body[:2000]!r}")


def run(kind: str, requests: int = REPEATS) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-guard-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(measure(kind, Path(folder), requests))


def find_slower(counts: Counts, baseline: Counts) -> list[str]:
    """Return the rows that are above their limit, and rows without a baseline."""
    return [name for name, count in counts.items() if count > baseline.get(name, 0) * (1 + LIMIT)]


def format_table(counts: Counts, baseline: Counts, unit: str) -> str:
    lines = [f"{unit:14}{'baseline':>14}{'now':>14}{'change':>9}"]
    for name, count in counts.items():
        base = baseline.get(name, 0)
        change = f"{count / base - 1:+.1%}" if base else "new"
        lines.append(f"{name:14}{base:14,.0f}{count:14,.0f}{change:>9}")
    return "\n".join(lines)


def update(file: Path, baselines: dict[str, Counts], kinds: Sequence[str]) -> int:
    """Record the baselines of the counters that this machine has."""
    for kind in kinds:
        try:
            check_counter(kind)
        except CounterUnavailable as error:
            print(f"{kind}: not available ({error})")
            continue
        counts = {name: round(count) for name, count in run(kind).items()}
        name = make_baseline_name(kind)
        print(f"{name}\n{format_table(counts, baselines.get(name, {}), UNITS[kind])}\n")
        baselines[name] = counts
    file.write_text(json.dumps(dict(sorted(baselines.items())), indent=2) + "\n")
    return 0


def guard(baselines: Mapping[str, Counts], kinds: Sequence[str], requests: int) -> int:
    choice, reasons = choose(kinds, baselines)
    print(*(f"bench-guard: {reason}" for reason in reasons), sep="\n", end="\n" if reasons else "")
    if choice is None:
        print("bench-guard: SKIPPED, nothing was compared")
        return 0
    began = time.monotonic()
    counts = run(choice.kind, requests)
    if find_slower(counts, choice.baseline):
        # A disturbance only adds work, so the smaller count is the right one.
        again = run(choice.kind, requests)
        counts = {name: min(count, again[name]) for name, count in counts.items()}
    print(f"bench-guard: {make_baseline_name(choice.kind)}, {time.monotonic() - began:.0f} seconds")
    print(format_table(counts, choice.baseline, UNITS[choice.kind]))
    slower = find_slower(counts, choice.baseline)
    if slower:
        print(f"bench-guard: more than {LIMIT:.0%} above the baseline: {', '.join(slower)}.", file=sys.stderr)
        print("If this is intended, record it: make bench-guard ARGS=--update", file=sys.stderr)
        return 1
    faster = [name for name, count in counts.items() if count < choice.baseline[name] * (1 - LIMIT)]
    if faster:
        print(f"bench-guard: faster by more than {LIMIT:.0%}: {', '.join(faster)}; ARGS=--update records it")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard", description="Compare the work of a request with the committed baseline."
    )
    parser.add_argument("--update", action="store_true", help="record the counts of this machine as the baseline")
    parser.add_argument("--kind", choices=KINDS, help="use this counter only")
    parser.add_argument("--baselines", type=Path, default=BASELINES, metavar="FILE", help="the baseline file")
    parser.add_argument(
        "--requests",
        type=int,
        default=REPEATS,
        metavar="N",
        help=f"requests to count (default {REPEATS})",
    )
    arguments = parser.parse_args()
    if sys.platform != "linux":
        print("bench-guard: SKIPPED, it needs Linux")
        return 0
    kinds = [arguments.kind] if arguments.kind else KINDS
    baselines: dict[str, Counts] = json.loads(arguments.baselines.read_text()) if arguments.baselines.exists() else {}
    try:
        if arguments.update:
            return update(arguments.baselines, baselines, kinds)
        return guard(baselines, kinds, arguments.requests)
    except (InvalidAnswer, ProcessFailed) as error:
        print(f"bench-guard: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
