"""The targets of speed, each with its measured value."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.side_by_side.servers import (
    AGENTIC_API,
    ANTIPHON,
    ANTIPHON_RESPONSES,
    LITELLM,
    OGX,
    OPEN_RESPONSES_SERVER,
)

Figures = Mapping[str, Any]


class Target(NamedTuple):
    """A target. `measured` is empty if there are no figures for it."""

    text: str
    measured: str
    is_met: bool


def format_targets(figures: Figures) -> str:
    lines = ["| target | measured | |", "|---|---|---|"]
    for target in list_targets(figures):
        verdict = "" if not target.measured else "met" if target.is_met else "**missed**"
        lines.append(f"| {target.text} | {target.measured or 'not measured'} | {verdict} |")
    return "\n".join(lines)


def list_targets(figures: Figures) -> Iterator[Target]:
    yield from _list_bridge_targets(figures.get("bridge", {}))
    yield from _list_peer_targets(figures.get("peers", {}))
    yield from _list_agent_targets(figures.get("agents", {}))
    yield _make_embedded_target(figures.get("embedded", {}))


def _list_bridge_targets(part: Figures) -> Iterator[Target]:
    names = {
        "a request, 2 tokens": "CPU of a request over Chat Completions, answer of 2 tokens, against skeletons",
        "a request, 200 tokens": "the same, answer of 200 tokens",
        "an event, 1 token a read": "CPU of a streamed event, 1 a read",
        "an event, 10 tokens a read": "CPU of a streamed event, 10 a read",
        "first event": "first event over going direct, 1 at once, ms",
        "1,000 items": "growth from 100 to 1,000 items",
        "200 tools": "growth from 20 to 200 tools",
    }
    rows = {row["name"]: row for row in part.get("rows", ())}
    for name, text in names.items():
        note = rows[name]["note"] if name in rows else ""
        if note and name == "first event":
            note = f"{rows[name]['values']['antiphon']:.2f}; {note}"
        yield Target(text, note, "missed" not in note)


def _list_peer_targets(peers: Figures) -> Iterator[Target]:
    plain = "requests/s, 200 tokens, 32 at once, stored"
    stream = "events/s, unpaced streams, 32 at once, stored"
    for text, least, key, work, ours, other in (
        (plain, 45, "rate", "plain", ANTIPHON, LITELLM),
        (stream, 150, "event_rate", "streamed", ANTIPHON, LITELLM),
        (stream, 15, "event_rate", "streamed", ANTIPHON, OPEN_RESPONSES_SERVER),
        (stream, 1.5, "event_rate", "streamed", ANTIPHON_RESPONSES, AGENTIC_API),
    ):
        ratio = compare(peers, work, key, ours.name, other.name)
        stretch = " (stretch goal: 75 x)" if least == 45 else ""
        measured = f"{ratio:.1f} x" if ratio else ""
        yield Target(f"{text}: at least {least:g} x {other.name}{stretch}", measured, (ratio or 0) >= least)
    process = peers.get("processes", {}).get(ANTIPHON.name, {})
    for text, key, most, unit in (
        ("start to first answer: at most 0.5 s", "start", 0.5, "s"),
        ("memory after the start: at most 50 MB", "idle", 50, "MB"),
    ):
        value = process.get(key)
        yield Target(text, f"{value:.2f} {unit}" if value else "", (value or 0) <= most)


def compare(peers: Figures, work: str, key: str, ours: str, other: str, *, store: bool = True) -> float | None:
    """Return our rate divided by that of another server, at 32 requests at once."""
    for each in peers.get("works", ()):
        if (each["name"], each["concurrency"], each["store"]) == (work, 32, store):
            values = [each["servers"].get(name, {}).get(key) for name in (ours, other)]
            if None not in values:
                return float(values[0]) / float(values[1])
    return None


def _list_agent_targets(part: Figures) -> Iterator[Target]:
    for text, name, least in (
        ("agent, a turn with a call, streamed", "a turn with a call, streamed", 15),
        ("agent, a text delta, 1 a read", "a text delta, 1 a read", 20),
        ("agent, a text delta, all in one read", "a text delta, all in one read", 20),
    ):
        rows = [row for row in part.get("rows", ()) if row["name"] == name]
        ratios = {
            key: rows[0]["ratios"][key] for key in ("openai-agents", "pydantic-ai") if rows and key in rows[0]["ratios"]
        }
        measured = ", ".join(f"{key} {ratio:.1f} x" for key, ratio in ratios.items())
        yield Target(f"{text}: others at least {least} x", measured, bool(ratios) and min(ratios.values()) >= least)


def _make_embedded_target(part: Figures) -> Target:
    text = "embedded model, tokens/s: within 5 % of llama.cpp's own server"
    notes = [f"{row['name']}: {row['note']}" for row in part.get("rows", ()) if row["note"]]
    return Target(text, "; ".join(notes), not any("missed" in note for note in notes))


def format_summary(figures: Figures) -> str:
    """Return the table of the README."""
    peers = figures["peers"]
    names = (ANTIPHON, LITELLM, OGX, OPEN_RESPONSES_SERVER, ANTIPHON_RESPONSES, AGENTIC_API)
    present = [peer.name for peer in names if peer.name in peers["processes"]]
    lines = [f"| 32 clients, answers of 200 tokens | {' | '.join(present)} |", f"|---|{'---:|' * len(present)}"]
    for text, name, key in (
        ("requests/s", "plain", "rate"),
        ("streamed events/s", "streamed", "event_rate"),
        ("CPU µs a streamed event", "streamed", "event_cpu"),
    ):
        work = next(
            each for each in peers["works"] if (each["name"], each["concurrency"], each["store"]) == (name, 32, True)
        )
        cells = [work["servers"].get(server, {}).get(key) for server in present]
        lines.append(f"| {text} | {' | '.join('–' if cell is None else f'{cell:,.0f}' for cell in cells)} |")
    idle = [f"{peers['processes'][server]['idle']:,.0f}" for server in present]
    lines.append(f"| memory after the start, MB | {' | '.join(idle)} |")
    return "\n".join(lines)
