"""Count the instructions of a request with metrics and traces, and compare them with one without.

    python -m benchmarks.telemetry_count [--kind perf|callgrind|calls] [--only off,traces] [--batches N]

The requests and the counters are those of guard.py. Every trace is recorded, and the export is counted too. Each count
covers whole batches of spans: the queue is exported at its size, not after a delay. The exit status is 1 if a request,
or a stream of 40 tokens, takes more than 5 % more with metrics, with traces, or with traces that are not sampled.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks import guard, telemetry
from benchmarks.client import InvalidAnswer
from benchmarks.counters import CounterUnavailable
from benchmarks.servers import ProcessFailed
from benchmarks.telemetry import make_variables, start_collector

LIMIT = 0.05
ROWS = ("request", "stream")
# A batch has 512 spans, and a request has two.
BATCH = 256
# An export runs in its thread while these requests are served. They are the first of the next batch.
OVERLAP = 16
# The interpreter specialises code that has run a few times.
WARM_UP = 4 * BATCH + OVERLAP
# The traces of this kind are turned on, but a sampler records none of them.
UNSAMPLED = "unsampled"
KINDS = (*telemetry.KINDS, UNSAMPLED)
_NO_DELAY = {"OTEL_BSP_SCHEDULE_DELAY": "600000", "OTEL_METRIC_EXPORT_INTERVAL": "600000"}

Counts = Mapping[str, Mapping[str, float]]


async def count(kind: str, names: Sequence[str], batches: int) -> dict[str, dict[str, float]]:
    """Return the instructions of a request and of a stream, by the name of the configuration."""
    counts: dict[str, dict[str, float]] = {}
    async with start_collector() as collector:
        for name in names:
            environment = make_variables("traces" if name == UNSAMPLED else name, collector) | _NO_DELAY
            if name == UNSAMPLED:
                environment["OTEL_TRACES_SAMPLER"] = "always_off"
            with tempfile.TemporaryDirectory(prefix="antiphon-telemetry-") as folder:
                found = await guard.measure(
                    kind, Path(folder), batches * BATCH, warm_up=WARM_UP, environment=environment
                )
            counts[name] = {row: found[row] for row in ROWS}
            print(f"{name:8}", *(f"{row} {number:12,.0f}" for row, number in counts[name].items()), flush=True)
    return counts


def format_table(counts: Counts, kind: str) -> str:
    """Return each row, in thousands if it counts instructions, and its change against the row without telemetry."""
    base, unit = counts["off"], 1 if kind == "calls" else 1000
    lines = ["| | request | stream of 40 tokens |", "|---|---|---|"]
    for name, rows in counts.items():
        cells = [f"{rows[row] / unit:,.0f}" + _format_change(rows[row], base[row], name) for row in ROWS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def find_excess(counts: Counts) -> list[str]:
    """Return the rows of metrics, or of traces, that are above the limit."""
    return [
        f"{name}, {row}"
        for name in ("prometheus", "metrics", "traces", UNSAMPLED)
        for row in ROWS
        if name in counts and counts[name][row] > counts["off"][row] * (1 + LIMIT)
    ]


def _format_change(number: float, base: float, name: str) -> str:
    return "" if name == "off" else f" ({number / base - 1:+.1%})"


def _read_names(text: str) -> list[str]:
    names = text.split(",")
    if not names or set(names) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}")
    return ["off", *(name for name in names if name != "off")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry_count", description="Count OpenTelemetry.")
    parser.add_argument("--kind", choices=guard.KINDS, default="callgrind", help="the counter (default callgrind)")
    parser.add_argument("--only", type=_read_names, default=KINDS, metavar="NAMES", help="off is added")
    parser.add_argument("--batches", type=int, default=1, metavar="N", help="batches of 256 requests (default 1)")
    arguments = parser.parse_args()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            counts = runner.run(count(arguments.kind, arguments.only, arguments.batches))
    except (CounterUnavailable, InvalidAnswer, ProcessFailed) as error:
        print(f"not counted: {error}", file=sys.stderr)
        return 1
    print(f"\n{format_table(counts, arguments.kind)}")
    excess = find_excess(counts)
    if excess:
        print(f"more than {LIMIT:.0%} above a server without telemetry: {'; '.join(excess)}", file=sys.stderr)
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
