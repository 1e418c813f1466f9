"""Rows of the report, built from the measurements."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, sub
from typing import Any

from benchmarks import bridge, queues, tasks
from benchmarks.agents import Costs
from benchmarks.chains import ITEMS_A_TURN, Sample
from benchmarks.crashes import RUNS, CrashCounts, Takeover
from benchmarks.report import Row, make_count_row, make_row
from benchmarks.rounds import Round, Rounds
from benchmarks.websocket import LENGTHY, MANY, ONE
from benchmarks.workloads import (
    ALONE,
    BRIEF,
    BRIEF_BACKGROUND,
    BRIEF_BATCHED,
    LONG,
    LONG_BACKGROUND,
    LONG_BATCHED,
    STORED,
    TEN_STORED,
    TEN_UNSTORED,
    UNSTORED,
    WORKLOADS,
    Workload,
)

REQUEST_TARGET = 2.5
EVENT_TARGET = 2.0
STORING_TARGET = 45.0
SOCKET_TARGET = 40
# Microseconds an item, in a chain of at least this length.
CHAIN_TARGET = 10.0
CHAIN_TARGET_TURNS = 1000
# Our CPU time at most these times that of the skeleton bridges.
BRIDGE_TARGETS = {bridge.AIOHTTP: 2.0, bridge.LEAN: 3.0}
BRIDGE_EVENT_TARGETS = {bridge.LEAN: 1.6}
# Milliseconds over going direct.
FIRST_EVENT_TARGET = 0.6

Pairs = Mapping[str, Sequence[tuple[float, float]]]


def make_load_rows(rounds: Rounds, servers: Sequence[str]) -> list[Row]:
    """Build the rows of the load rounds: CPU, throughput and latency."""

    def collect(workload: Workload, read: Callable[[Round], float]) -> dict[str, list[float]]:
        return {server: [read(each) for each in rounds[workload.name, server]] for server in servers}

    cpu, rate = attrgetter("cpu"), attrgetter("rate")
    rows = [
        make_row("CPU of the server, µs a request", each.name, collect(each, cpu), target=REQUEST_TARGET)
        for each in WORKLOADS
        if each not in (LONG, LONG_BATCHED)
    ]
    for name, long, brief in (("1 delta a read", LONG, BRIEF), ("10 deltas a read", LONG_BATCHED, BRIEF_BATCHED)):
        samples = _subtract(collect(long, cpu), collect(brief, cpu), long.events - brief.events)
        rows.append(make_row("CPU of the server, µs an event", name, samples, target=EVENT_TARGET))
    rows += [
        make_row("requests a second, 32 at once", each.name, collect(each, rate))
        for each in WORKLOADS
        if each.concurrency > 1 and not each.stream
    ]
    for name, long in (("1 delta a read", LONG), ("10 deltas a read", LONG_BATCHED)):
        samples = {server: [each * long.events for each in found] for server, found in collect(long, rate).items()}
        rows.append(make_row("stream events a second, 32 at once", name, samples))
    for workload in (ALONE, STORED):
        for quantile in ("p50", "p95"):
            name = f"{quantile}, {workload.concurrency} at once"
            samples = collect(workload, attrgetter(quantile))
            rows.append(make_row("latency, ms (and added)", name, samples, shows_added=True))
    for workload in WORKLOADS:
        if workload.model == BRIEF.model:
            name = f"first event, p50, {workload.concurrency} at once"
            samples = collect(workload, attrgetter("first"))
            rows.append(make_row("latency, ms (and added)", name, samples, shows_added=True))
    return rows


def _subtract(longs: dict[str, list[float]], briefs: dict[str, list[float]], more: int) -> dict[str, list[float]]:
    """Return the cost per event: the difference of a long and a short stream, divided by the additional events."""
    return {
        server: [(long - brief) / more for long, brief in zip(found, briefs[server], strict=True)]
        for server, found in longs.items()
    }


def make_state_rows(plain: Rounds, stateful: Rounds, server: str) -> list[Row]:
    """Build the rows for the cost of state: the same work without and with it, on the same server."""

    def pair(rounds: Rounds, without: Workload, having: Workload, *, share: int = 1) -> dict[str, list[float]]:
        pairs = {"without": without, "with": having}
        return {name: [each.cpu / share for each in rounds[found.name, server]] for name, found in pairs.items()}

    section = "CPU of the server, µs"
    rows = [
        make_row(section, name, pair(plain, without, having), shows_added=True, added_target=STORING_TARGET)
        for name, without, having in (
            ("storing a response, 1 message", UNSTORED, STORED),
            ("storing a response, 10 items", TEN_UNSTORED, TEN_STORED),
        )
    ]
    brief = pair(stateful, BRIEF, BRIEF_BACKGROUND)
    long = pair(stateful, LONG, LONG_BACKGROUND)
    rows.append(make_row(section, "in the background, 2 tokens", brief, shows_added=True))
    rows.append(make_row(section, "in the background, 200 tokens", long, shows_added=True))
    tokens = _subtract(long, brief, LONG.events - BRIEF.events)
    return [*rows, make_row(section, "event log, a token", tokens, shows_added=True)]


def make_chain_rows(found: Mapping[int, Sequence[Sample]]) -> list[Row]:
    rows = []
    for turns, samples in found.items():
        name = f"{turns:,} turn{'s' if turns > 1 else ''}"
        without = [sample.without for sample in samples]
        cases = {
            name: [sample.next_turn for sample in samples],
            f"{name}, first request of a process": [sample.first for sample in samples],
        }
        for case, times in cases.items():
            added = statistics.median(map(sub, times, without)) / (turns * ITEMS_A_TURN) * 1e3
            remark = f"{added:.1f} µs an item"
            if turns >= CHAIN_TARGET_TURNS:
                remark += f", at most {CHAIN_TARGET:g}: {'met' if added <= CHAIN_TARGET else 'missed'}"
            values = {"without": without, "with": times}
            rows.append(make_row("loading a chain, CPU ms", case, values, shows_added=True, remark=remark))
    return rows


def make_idle_rows(found: Mapping[str, tuple[float, float]], streams: int) -> list[Row]:
    section = f"resident memory with {streams} idle streams, MB"
    return [
        make_row(
            section,
            kind,
            {"without": [before], "with": [after]},
            shows_added=True,
            remark=f"{(after - before) / streams * 1024:.0f} kB a stream",
        )
        for kind, (before, after) in found.items()
    ]


def make_idle_socket_row(found: tuple[float, float], sockets: int) -> Row:
    before, after = found
    each = (after - before) / sockets * 1024
    verdict = "met" if each <= SOCKET_TARGET else "missed"
    return make_row(
        f"resident memory with {sockets} idle WebSockets, MB",
        "after one turn each",
        {"without": [before], "with": [after]},
        shows_added=True,
        remark=f"{each:.0f} kB a WebSocket, at most {SOCKET_TARGET}: {verdict}",
    )


def make_socket_rows(found: Rounds) -> list[Row]:
    """Build the rows of turns over HTTP and over open WebSockets."""

    def collect(workload: Workload, read: Callable[[Round], float]) -> dict[str, list[float]]:
        return {
            transport: [read(each) for each in found[workload.name, transport]] for transport in ("http", "websocket")
        }

    cpu, rate, first = attrgetter("cpu"), attrgetter("rate"), attrgetter("first")
    section = "turns over a WebSocket"
    events = _subtract(collect(LENGTHY, cpu), collect(MANY, cpu), LENGTHY.events - MANY.events)
    return [
        make_row(section, "turns a second, 1 at once", collect(ONE, rate)),
        make_row(section, "turns a second, 32 at once", collect(MANY, rate)),
        make_row(section, "CPU of the server, µs a turn, 32 at once", collect(MANY, cpu)),
        make_row(section, "CPU of the server, µs an event", events),
        make_row(section, "first event, p50, 1 at once, ms", collect(ONE, first), shows_added=True),
    ]


def make_agent_rows(costs: Costs, agents: Sequence[str]) -> list[Row]:
    """Build the rows for the cost of a run, a turn and a delta."""

    def collect(task: tasks.Task) -> dict[str, list[float]]:
        return {agent: costs[task.name, agent] for agent in agents}

    section = "CPU of an agent, µs"
    rows = [make_row(section, "a run of 2 turns, 1 call", collect(tasks.FEW_CALLS))]
    for name, many, few in (
        ("a turn with a call, streamed", tasks.MANY_CALLS, tasks.FEW_CALLS),
        ("a turn with a call, not streamed", tasks.MANY_CALLS_WHOLE, tasks.FEW_CALLS_WHOLE),
    ):
        rows.append(make_row(section, name, _subtract(collect(many), collect(few), many.calls - few.calls)))
    for name, many, few in (
        ("a text delta, 1 a read", tasks.MANY_WORDS_PACED, tasks.FEW_WORDS_PACED),
        ("a text delta, all in one read", tasks.MANY_WORDS, tasks.FEW_WORDS),
    ):
        rows.append(make_row(section, name, _subtract(collect(many), collect(few), many.deltas - few.deltas)))
    return rows


def make_bridge_rows(found: Rounds) -> list[Row]:
    """Build the rows for the cost of a request and an event over Chat Completions."""
    servers = list(dict.fromkeys(server for _, server in found if server != bridge.DIRECT))

    def collect(workload: Workload, read: Callable[[Round], float] = attrgetter("cpu")) -> dict[str, list[float]]:
        return {server: [read(each) for each in found[workload.name, server]] for server in servers}

    section = "bridge from Chat Completions: CPU of the server, µs"
    rows = [
        _make_bridge_row(section, f"a request, {each.name}", collect(each), BRIDGE_TARGETS)
        for each in (bridge.SHORT_ANSWER, bridge.LONG_ANSWER, bridge.FEW)
    ]
    for name, many, few in (
        ("an event, 1 token a read", bridge.MANY, bridge.ALONE),
        ("an event, 10 tokens a read", bridge.MANY_BATCHED, bridge.FEW_BATCHED),
    ):
        samples = _subtract(collect(many), collect(few), many.events - few.events)
        rows.append(_make_bridge_row(section, name, samples, BRIDGE_EVENT_TARGETS))
    rows += _make_growth_rows(collect)
    section = "bridge from Chat Completions: time over going direct, 1 at once, ms"
    direct = found[bridge.ALONE.name, bridge.DIRECT]
    for name, field, target in (
        ("first event", "first", FIRST_EVENT_TARGET),
        ("first text delta", "delta", None),
        ("whole answer of 2 tokens", "p50", None),
    ):
        read = attrgetter(field)
        samples = {
            server: [one - read(base) for one, base in zip(measured, direct, strict=True)]
            for server, measured in collect(bridge.ALONE, read).items()
        }
        added = statistics.median(samples[bridge.ANTIPHON])
        remark = f"antiphon at most {target:g}: {_judge(added, target)}" if target else ""
        rows.append(make_row(section, name, samples, remark=remark))
    return rows


def _make_bridge_row(section: str, name: str, samples: dict[str, list[float]], targets: Mapping[str, float]) -> Row:
    """Build a row whose remark compares our server with the skeleton bridges."""
    remarks = []
    for base, target in targets.items():
        pairs = zip(samples[bridge.ANTIPHON], samples[base], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs if theirs)
        remarks.append(f"{ratio:.2f} x {base}, at most {target:g}: {_judge(ratio, target)}")
    return make_row(section, name, samples, remark="; ".join(remarks))


def _judge(value: float, target: float) -> str:
    return "met" if value <= target else "missed"


def _make_growth_rows(collect: Callable[[Workload], dict[str, list[float]]]) -> list[Row]:
    """Build the rows for long inputs and tool lists. Their targets bound the growth."""
    section = "bridge from Chat Completions: CPU of the server, µs, by size"
    rows = [make_row(section, each.name, collect(each)) for each in (*bridge.ITEMS.values(), *bridge.TOOLS.values())]
    items, tools = (
        {size: collect(workload)[bridge.ANTIPHON] for size, workload in workloads.items()}
        for workloads in (bridge.ITEMS, bridge.TOOLS)
    )
    # The cost of ten items stands for the fixed cost of a request.
    growth = statistics.median(
        (many - fixed) / few for many, few, fixed in zip(items[1000], items[100], items[10], strict=True)
    )
    more = statistics.median(many / few for many, few in zip(tools[200], tools[20], strict=True))
    remarks = {
        bridge.ITEMS[1000].name: f"antiphon: {growth:.2f} x 100 items + fixed cost, at most 6: {_judge(growth, 6)}",
        bridge.TOOLS[200].name: f"antiphon: {more:.2f} x 20 tools, at most 8: {_judge(more, 8)}",
    }
    return [row._replace(remark=remarks.get(row.name, "")) for row in rows]


def make_queue_rows(found: queues.Measurements) -> list[Row]:
    """Build the rows for the cost of a background response, from acceptance to its last event."""
    names = [each.name for each in queues.IMPLEMENTATIONS]

    def collect(at_once: int, read: Callable[[queues.Round], float]) -> dict[str, list[float]]:
        return {name: [read(each) for each in found.rounds[at_once, name]] for name in names}

    section = "background response, from acceptance to last event"
    rows = [
        make_row(section, f"{at_once} at once, {unit}", collect(at_once, attrgetter(field)))
        for at_once in queues.RESPONSES
        for unit, field in (("ms", "p50"), ("ms of CPU", "cpu"), ("responses a second", "rate"))
    ]
    return rows + [
        make_row(section, f"{pause}, ms of CPU a second", {name: found.idle[pause, name] for name in names})
        for pause in queues.PAUSES
    ]


def make_takeover_rows(found: Mapping[str, Sequence[Takeover]], lease: float) -> list[Row]:
    section = f"kill -9 with {RUNS} runs: seconds until all have ended (lease: {lease:g})"
    return [
        make_row(section, name, {queue: [read(each) for each in takeovers] for queue, takeovers in found.items()})
        for name, read in (
            ("the process restarts", attrgetter("restart")),
            ("another process takes over", attrgetter("alive")),
        )
    ]


def make_crash_count_rows(counts: Mapping[str, CrashCounts]) -> list[Row]:
    return [
        make_count_row(f"of {RUNS} runs", name, {queue: getattr(each, field) for queue, each in counts.items()})
        for name, field in (
            ("lost when killed after the first commit", "lost"),
            ("continued by a suspended process after the takeover", "resumed"),
            ("changed by the suspended process", "changed"),
        )
    ]


def make_process_rows(readings: Sequence[tuple[str, Mapping[str, Sequence[float]]]]) -> list[Row]:
    return [make_row("process", name, samples, shows_added=True) for name, samples in readings]


def make_pair_rows(section: str, pairs: Pairs, servers: Sequence[str]) -> list[Row]:
    """Build the rows of pairs: the base, then ours."""
    base, ours = servers
    rows = []
    for name, found in pairs.items():
        samples: dict[str, Any] = {base: [pair[0] for pair in found], ours: [pair[1] for pair in found]}
        rows.append(make_row(section, name, samples))
    return rows
