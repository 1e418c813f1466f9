"""The tables of docs/scaling.md, from the figures that `benchmarks.capacity --record` stores in capacity.json.

python -m benchmarks.capacity_page    # write the tables again
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import replace_section
from benchmarks.servers import ROOT

FIGURES = Path(__file__).with_name("capacity.json")
PAGE = ROOT / "docs" / "scaling.md"
TOKENS = 200
STREAM = "stream of 200 tokens"
PACED = "stream of 200 tokens in 2 s, 64 at once"
PACED_PAIR = "stream of 200 tokens in 2 s, 2 at once"
BACKGROUND = "background, 200 tokens in 2 s, followed"
BACKGROUND_PAIR = f"{BACKGROUND}, 2 at once"
Row = Mapping[str, Any]

_RATES = (10**2, 10**4, 10**6)
_STREAM_SECONDS = 5
_USED = 0.7
_CONNECTIONS = 10
_DAY = 24 * 60 * 60


def record(machine: Mapping[str, str], rows: Sequence[Row] = (), memory: Mapping[str, float] | None = None) -> None:
    """Store new figures, which replace those of the same workload and store, and write the page again."""
    figures = json.loads(FIGURES.read_text())
    FIGURES.write_text(json.dumps(merge(figures, machine, rows, memory), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(json.loads(FIGURES.read_text())))


def merge(
    figures: Mapping[str, Any], machine: Mapping[str, str], rows: Sequence[Row], memory: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return the figures with new ones in the places of the old ones."""
    new = {(row["workload"], row["store"]): row for row in rows}
    merged = [new.pop((row["workload"], row["store"]), row) for row in figures["rows"]]
    return {"recorded": machine, "memory": memory or figures["memory"], "rows": [*merged, *new.values()]}


def render(figures: Mapping[str, Any]) -> str:
    """Return the page with these figures."""
    rows, memory = figures["rows"], figures["memory"]
    page = PAGE.read_text()
    for name, content in (
        ("cost", f"{_format_origin(figures['recorded'], rows)}\n\n{format_rows(rows)}"),
        ("memory", format_memory(memory)),
        ("writes", _format_writes(rows)),
        ("model", "\n".join(_format_model(_find(rows, STREAM, "PostgreSQL"), memory))),
        ("token", _format_token(rows)),
    ):
        page = replace_section(page, name, content)
    return page


def format_rows(rows: Sequence[Row]) -> str:
    sizes = "bytes in | bytes out | statements | transactions | bytes written | bytes stored"
    lines = [f"| workload | store | {sizes} | CPU, µs | PostgreSQL's CPU, µs |", f"|{'---|' * 10}"]
    for row in rows:
        database = row["database_cpu_us"]
        lines.append(
            f"| {row['workload']} | {row['store']} | {row['received']:,.0f} | {row['sent']:,.0f} | "
            f"{row['statements']:.2f} | {row['transactions']:.3f} | {row['written_bytes']:,.0f} | "
            f"{row['stored_bytes']:,.0f} | {row['cpu_us']:,.0f} | {'' if database is None else f'{database:,.0f}'} |"
        )
    return "\n".join(lines)


def _format_origin(machine: Mapping[str, str], rows: Sequence[Row]) -> str:
    hardware = f"{machine['processor']}, {machine['cores']} cores"
    loads = [row["load"] for row in rows if row["load"] is not None]
    load = f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "load not recorded"
    if 0 < len(loads) < len(rows):
        load += f" (not recorded for {len(rows) - len(loads)} rows)"
    return f"{machine['date']}, {hardware}, {load}, Python {machine['python']}."


def format_memory(memory: Mapping[str, float]) -> str:
    streams = f"{memory['foreground']:.0f} KB in the foreground and {memory['background']:.0f} KB in the background"
    return f"A process takes {memory['process']:.0f} MB without streams. An open stream takes {streams}."


def _format_token(rows: Sequence[Row]) -> str:
    stream, whole = _find(rows, STREAM, "PostgreSQL"), _find(rows, "response", "PostgreSQL")
    cpu, sent = ((stream[name] - whole[name]) / TOKENS for name in ("cpu_us", "sent"))
    return (
        f"A token of a stream costs {cpu:.0f} µs of CPU and {sent:.0f} bytes: the difference of a stream and a whole "
        "response, for each token."
    )


def _format_writes(rows: Sequence[Row]) -> str:
    counts = "transactions for a response of 200 tokens in 2 s | per token"
    ratios = "CPU, as a multiple of the foreground stream's"
    lines = [f"| background responses at once on a node | {counts} | {ratios} |", f"|{'---|' * 4}"]
    for workload, foreground, count in ((BACKGROUND_PAIR, PACED_PAIR, 2), (BACKGROUND, PACED, 64)):
        for store in ("SQLite", "PostgreSQL"):
            row = _find(rows, workload, store)
            found, ratio = row["transactions"], row["cpu_us"] / _find(rows, foreground, store)["cpu_us"]
            lines.append(f"| {count} ({store}) | {found:.1f} | {found / TOKENS:.3f} | {ratio:.1f} |")
    return "\n".join(lines)


def _format_model(row: Row, memory: Mapping[str, float]) -> Iterator[str]:
    stream = memory["foreground"] * 1000
    cpu, database = row["cpu_us"] / 1e6, row["database_cpu_us"]
    cores = [rate * cpu / _USED for rate in _RATES]
    yield "| | formula | 10² | 10⁴ | 10⁶ |\n|---|---|---|---|---|"
    yield _join("cores of nodes", f"R × {cpu * 1000:.1f} ms / {_USED}", map(_shorten, cores))
    if database is not None:
        used = [rate * database / 1e6 / _USED for rate in _RATES]
        yield _join("cores of PostgreSQL", f"R × {database / 1000:.2f} ms / {_USED}", map(_shorten, used))
    yield _join("open streams", f"R × {_STREAM_SECONDS} s", (f"{rate * _STREAM_SECONDS:,}" for rate in _RATES))
    sizes = (_format_bytes(rate * _STREAM_SECONDS * stream) for rate in _RATES)
    yield _join("memory of streams", f"{memory['foreground']:.0f} KB each", sizes)
    traffic = (_format_bits(rate * row["sent"] * 8) for rate in _RATES)
    yield _join("traffic to clients", f"R × {row['sent'] / 1000:.1f} KB", traffic)
    yield _join("rows written", "R", (f"{rate:,}/s" for rate in _RATES))
    statements = (f"{_shorten(rate * row['statements'])}/s" for rate in _RATES)
    yield _join("statements", f"R × {row['statements']:.2f}, fewer with more at once", statements)
    transactions = (f"{_shorten(rate * row['transactions'])}/s" for rate in _RATES)
    yield _join("transactions", f"R × {row['transactions']:.3f}, fewer with more at once", transactions)
    log = (f"{_format_bytes(rate * row['written_bytes'])}/s" for rate in _RATES)
    yield _join("write-ahead log", f"R × {row['written_bytes'] / 1000:.1f} KB", log)
    growth = (f"{_format_bytes(rate * row['stored_bytes'] * _DAY)}/day" for rate in _RATES)
    yield _join("growth of the database", f"R × {row['stored_bytes'] / 1000:.1f} KB", growth)
    connections = (f"{math.ceil(each) * _CONNECTIONS:,}" for each in cores)
    yield _join("connections to PostgreSQL", f"{_CONNECTIONS} for each process", connections)


def _find(rows: Sequence[Row], workload: str, store: str) -> Row:
    return next(row for row in rows if (row["workload"], row["store"]) == (workload, store))


def _join(name: str, formula: str, cells: Iterator[str]) -> str:
    return f"| {name} | {formula} | {' | '.join(cells)} |"


def _shorten(value: float) -> str:
    """Return a number with two significant digits."""
    if value < 1:
        return f"{value:.1f}"
    digits = -math.floor(math.log10(value)) + 1
    return f"{round(value, digits):,.0f}" if value >= 10 else f"{value:.1f}"


def _format_bytes(value: float) -> str:
    return _scale(value, ("B", "KB", "MB", "GB", "TB", "PB"))


def _format_bits(value: float) -> str:
    return _scale(value, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def _scale(value: float, units: Sequence[str]) -> str:
    index = 0
    while value >= 1000 and index + 1 < len(units):
        value, index = value / 1000, index + 1
    return f"{_shorten(value)} {units[index]}"


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(FIGURES.read_text())))
