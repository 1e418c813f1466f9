"""Load rounds on running servers. The servers take turns, so that disturbances affect all of them."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.client import Answer, Client, InvalidAnswer, post
from benchmarks.servers import RunningServer
from benchmarks.workloads import Workload

_SECONDS = 30.0


class Round(NamedTuple):
    """Results of a round: CPU microseconds per request, answers per second, latencies in milliseconds."""

    cpu: float
    rate: float
    p50: float
    p95: float
    first: float
    delta: float = 0.0


Check = Callable[[str, Workload, Answer], None]
Rounds = dict[tuple[str, str], list[Round]]
"""Rounds by workload and server name. All lists have the same length; equal indexes are from the same time."""


async def measure(
    servers: Sequence[RunningServer],
    clients: dict[str, Client],
    workloads: Sequence[Workload],
    *,
    rounds: int,
    scale: float,
    check: Check | None = None,
    scales: Mapping[str, float] | None = None,
) -> Rounds:
    """Measure every workload on every server, round by round. `scales` has further factors for slow servers."""
    found: Rounds = defaultdict(list)
    for _ in range(rounds):
        for workload in workloads:
            for server in servers:
                part = scale * (scales or {}).get(server.name, 1)
                found[workload.name, server.name].append(
                    await run_round(server, clients[server.name], workload, scale=part, check=check)
                )
    return dict(found)


async def run_round(
    server: RunningServer, client: Client, workload: Workload, *, scale: float = 1, check: Check | None = None
) -> Round:
    """Run one round with a fraction `scale` of the requests. `check` raises InvalidAnswer."""
    count = max(workload.concurrency, round(workload.requests * scale))
    request = post(workload.body, key=workload.key)
    before = server.cpu
    answers = await client.load(request, count=count, concurrency=workload.concurrency, seconds=_SECONDS)
    cpu = server.cpu - before
    for answer in answers:
        (check or _check)(server.name, workload, answer)
    return summarize(answers, cpu, workload.concurrency)


def summarize(answers: Sequence[Answer], cpu: float, concurrency: int) -> Round:
    """Return the figures of a round that took `cpu` seconds of CPU time."""
    count = len(answers)
    wholes = sorted(answer.whole * 1e3 for answer in answers)
    return Round(
        cpu=cpu / count * 1e6,
        rate=concurrency * count / sum(answer.whole for answer in answers),
        p50=statistics.median(wholes),
        p95=wholes[int(len(wholes) * 0.95)],
        first=statistics.median(answer.first * 1e3 for answer in answers),
        delta=statistics.median(answer.delta * 1e3 for answer in answers),
    )


def _check(name: str, workload: Workload, answer: Answer) -> None:
    """Check status and completion only, because every answer is checked."""
    if workload.stream:
        right = answer.body.count(b"\ndata: {") == workload.events
    else:
        right = b'"status":"completed"' in answer.body
    if answer.status != 200 or not right:
        raise InvalidAnswer(f"{name}, {workload.name}: {answer.head + answer.body[:2000]!r}")


async def check_equivalence(servers: Sequence[RunningServer], clients: dict[str, Client], workload: Workload) -> None:
    """Raise InvalidAnswer unless all servers return the same event types, text and required fields."""
    answers = {server.name: _read(await clients[server.name].send(post(workload.body)), workload) for server in servers}
    base = servers[0].name
    expected_types, _, expected_fields = answers[base]
    for name, (types, text, fields) in answers.items():
        if types != expected_types or text != workload.text or not fields >= expected_fields:
            raise InvalidAnswer(f"{name} does not do the same work as {base} ({workload.name}): {answers[name]}")


def _read(answer: Answer, workload: Workload) -> tuple[list[str], str, set[str]]:
    _check("equivalence", workload, answer)
    if not workload.stream:
        response = json.loads(answer.content)
        return [], response["output"][0]["content"][0]["text"], set(response)
    messages = [message.split(b"\ndata: ") for message in answer.content.split(b"\n\n")]
    events = [json.loads(message[1]) for message in messages if len(message) == 2]
    types = [event["type"] for event in events]
    response = events[-1]["response"]
    return types, "".join(event.get("delta", "") for event in events), set(response)
