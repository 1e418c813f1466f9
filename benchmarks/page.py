"""The pages that show figures: docs/benchmarks.md with its chart, and the table of the README.

Measurements record their figures in figures.json. The pages are written from there, between markers, so no figure is
typed by hand.

    python -m benchmarks.page    # write the pages again
"""

import datetime as dt
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chart, targets
from benchmarks.servers import ROOT
from benchmarks.side_by_side.servers import PEERS, Peer

FIGURES = Path(__file__).with_name("figures.json")
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "benchmarks.svg"
README = ROOT / "README.md"
Figures = dict[str, Any]
# The figures of a work, in the order of the table: name, key, and whether the value of the upstream is subtracted.
_ROWS = (
    ("requests/s", "rate", False),
    ("events/s", "event_rate", False),
    ("CPU µs a request", "cpu", False),
    ("CPU µs an event", "event_cpu", False),
    ("added latency, p50 ms", "p50", True),
    ("added latency, p99 ms", "p99", True),
    ("first event, added, ms", "first", True),
    ("first token, added, ms", "delta", True),
)
_STREAM_ONLY = {"events/s", "CPU µs an event"}
_NOT_FOR_STREAMS = {"requests/s", "CPU µs a request"}


def describe_machine() -> dict[str, str]:
    """Return date, processor and Python version, without names of the host."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": model[1] if model else platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def record(name: str, figures: Figures) -> None:
    """Store the figures of a measurement and write the pages again."""
    stored = load()
    stored[name] = figures
    FIGURES.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    write(stored)


def load() -> Figures:
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}  # type: ignore[no-any-return]


def write(figures: Figures) -> None:
    for path, text in render(figures).items():
        path.write_text(text)


def render(figures: Figures) -> dict[Path, str]:
    """Return the contents of every page, by its path."""
    page, readme = PAGE.read_text(), README.read_text()
    sections: dict[str, Callable[[], str]] = {
        "targets": lambda: targets.format_targets(figures),
        "peers": lambda: format_peers(figures["peers"]),
        "settings": lambda: format_settings(figures["peers"]),
        **{
            part: lambda part=part: format_part(figures[part])
            for part in ("bridge", "agents", "embedded", "servers", "nodes", "hosted", "code", "retrieval")
        },
    }
    for name, make in sections.items():
        if name in figures or name == "targets" or (name == "settings" and "peers" in figures):
            page = replace_section(page, name, make())
    if "peers" in figures:
        readme = replace_section(readme, "speed", targets.format_summary(figures))
    return {PAGE: page, README: readme, CHART: chart.draw(figures.get("peers", {"works": []}))}


def replace_section(text: str, name: str, content: str) -> str:
    """Replace the text between the markers of a section."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        return text
    return f"{head}{begin}\n\n{content.strip()}\n\n{end}{tail}"


# The comparison with other servers


def format_peers(figures: Figures) -> str:
    notes: list[str] = []
    names = [name for name in ("direct", *(peer.name for peer in PEERS)) if _has(figures, name)]
    lines = [_join(["work", "figure", *names]), _join(["---", "---", *["---:"] * len(names)])]
    for work in figures["works"]:
        lines += _format_work(work, names, notes)
    lines += _format_processes(figures["processes"], names)
    machine = figures["recorded"]
    made = (
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, load {machine['load']}, Python "
        f"{machine['python']}; {figures['seconds']} seconds, medians of at most {figures['rounds']} rounds; "
        f"{figures['cores']}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in figures["versions"].items() if "(R)" not in name)
        + "."
    )
    missing = [f"- {name}: {reason}" for name, reason in figures["missing"].items()]
    footnotes = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([made, "", *lines, "", *footnotes, *missing])


def _has(figures: Figures, name: str) -> bool:
    return any(name in work["servers"] for work in figures["works"])


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_work(work: Figures, names: Sequence[str], notes: list[str]) -> Iterator[str]:
    servers = work["servers"]
    title = f"{work['name']}, {'stored' if work['store'] else 'not stored'}, {work['concurrency']} at once"
    streamed = any("event_rate" in servers.get(name, {}) for name in names)
    direct = servers.get("direct", {})
    for name, key, is_added in _ROWS:
        if name in (_NOT_FOR_STREAMS if streamed else _STREAM_ONLY) or (is_added and key not in direct):
            continue
        cells = []
        for server in names:
            found = servers.get(server, {})
            value = found.get(key)
            if value is None:
                cells.append(_mark(found, server, work, notes, is_first=not title.startswith(" ")))
            elif is_added:
                cells.append("" if server == "direct" else format_number(value - direct[key]))
            elif server == "direct" and "cpu" in key:
                cells.append("")
            else:
                cells.append(format_number(value) + _remark(server, work, notes))
        if any(cell not in ("", "–") for cell in cells):
            yield _join([title.strip() if title else "", name, *cells])
            title = ""


def _mark(found: Figures, server: str, work: Figures, notes: list[str], *, is_first: bool) -> str:
    """Return a dash with its footnote, or nothing where the upstream has no such work."""
    reason = found.get("reason")
    if server == "direct" or reason is None:
        return ""
    return f"–{_number(f'{server}: {reason}', notes)}"


def _remark(server: str, work: Figures, notes: list[str]) -> str:
    peer: Peer | None = next((peer for peer in PEERS if peer.name == server), None)
    if peer is None or not work["store"] or "store" not in peer.remarks:
        return ""
    return _number(f"{server}: {peer.remarks['store']}", notes)


def _number(note: str, notes: list[str]) -> str:
    note = re.sub(r"\s+", " ", note).replace("|", "\\|").replace("<", "&lt;")
    if note not in notes:
        notes.append(note)
    return f" ({notes.index(note) + 1})"


def _format_processes(processes: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Iterator[str]:
    for name, key in (
        ("start to first answer, s", "start"),
        ("memory after the start, MB", "idle"),
        ("memory after the load, MB", "loaded"),
        ("installed size, MB", "installed"),
    ):
        cells = [processes.get(server, {}).get(key) for server in names]
        title = "process" if key == "start" else ""
        yield _join([title, name, *("" if cell is None else format_number(cell) for cell in cells)])


def format_settings(figures: Figures) -> str:
    lines = [_join(["server", "version", "upstream", "settings"]), _join(["---"] * 4)]
    for peer in PEERS:
        version = figures["versions"].get(peer.name, "–")
        lines.append(_join([peer.name, version, peer.upstream, peer.settings]))
    return "\n".join(lines)


def format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


# The parts of `make bench`


def format_part(figures: Figures) -> str:
    """Return the rows of a part as Markdown tables: one for each set of columns."""
    machine = figures["recorded"]
    made = f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, load {machine['load']}"
    lines = [f"{made}, Python {machine['python']}; {'; '.join(figures['notes'])}."]
    columns: list[str] = []
    section = ""
    for row in figures["rows"]:
        if list(row["values"]) != columns:
            columns, section = list(row["values"]), ""
            lines += ["", _join(["", *columns, ""]), _join(["---", *["---:"] * len(columns), "---"])]
        if row["section"] != section:
            section = row["section"]
            lines.append(_join([f"**{section}**", *[""] * len(columns), ""]))
        cells = [_format_cell(name, value, row["ratios"]) for name, value in row["values"].items()]
        lines.append(_join([row["name"], *cells, row["note"]]))
    return "\n".join(lines)


def _format_cell(name: str, value: float, ratios: Mapping[str, float]) -> str:
    ratio = f" ({ratios[name]:.2f} x)" if name in ratios else ""
    return format_number(value) + ratio


if __name__ == "__main__":
    write(load())
    sys.exit(0)
