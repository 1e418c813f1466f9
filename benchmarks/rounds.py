"""Rounds of load on running servers, in turns: what disturbs one server disturbs the others as much."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.client import Answer, BadAnswer, Client, post
from benchmarks.servers import Running
from benchmarks.workloads import Workload

_SECONDS = 30.0


class Round(NamedTuple):
    """What one round showed: microseconds of the server's CPU and answers a second; latencies in milliseconds."""

    cpu: float
    rate: float
    p50: float
    p95: float
    first: float


Check = Callable[[str, Workload, Answer], None]
Rounds = dict[tuple[str, str], list[Round]]
"""By the names of the workload and the server; all lists are equally long, and their n-th rounds are neighbours."""


async def measure(
    servers: Sequence[Running],
    clients: dict[str, Client],
    workloads: Sequence[Workload],
    *,
    rounds: int,
    scale: float,
    check: Check | None = None,
) -> Rounds:
    found: Rounds = defaultdict(list)
    for _ in range(rounds):
        for workload in workloads:
            for server in servers:
                found[workload.name, server.name].append(
                    await play(server, clients[server.name], workload, scale=scale, check=check)
                )
    return dict(found)


async def play(
    server: Running, client: Client, workload: Workload, *, scale: float = 1, check: Check | None = None
) -> Round:
    """One round, with a part of the workload's requests. `check` raises for an answer that is not right."""
    count = max(workload.concurrency, round(workload.requests * scale))
    request = post(workload.body, key=workload.key)
    before = server.cpu
    answers = await client.load(request, count=count, concurrency=workload.concurrency, seconds=_SECONDS)
    cpu = server.cpu - before
    for answer in answers:
        (check or _check)(server.name, workload, answer)
    wholes = sorted(answer.whole * 1e3 for answer in answers)
    return Round(
        cpu=cpu / count * 1e6,
        rate=workload.concurrency * count / sum(answer.whole for answer in answers),
        p50=statistics.median(wholes),
        p95=wholes[int(len(wholes) * 0.95)],
        first=statistics.median(answer.first * 1e3 for answer in answers),
    )


def _check(name: str, workload: Workload, answer: Answer) -> None:
    """Cheap signs of a right answer, for every one of them."""
    if workload.stream:
        right = answer.body.count(b"\ndata: {") == workload.events
    else:
        right = b'"status":"completed"' in answer.body
    if answer.status != 200 or not right:
        raise BadAnswer(f"{name}, {workload.name}: {answer.head + answer.body[:2000]!r}")


async def compare(servers: Sequence[Running], clients: dict[str, Client], workload: Workload) -> None:
    """Raise unless every server does the same work: the events in their order, the text, every required field."""
    told = {server.name: _read(await clients[server.name].ask(post(workload.body)), workload) for server in servers}
    measure_name = servers[0].name
    for name, (kinds, text, fields) in told.items():
        expected_kinds, _, expected_fields = told[measure_name]
        if kinds != expected_kinds or text != workload.text or not fields >= expected_fields:
            raise BadAnswer(f"{name} does not do the work of {measure_name} ({workload.name}): {told[name]}")


def _read(answer: Answer, workload: Workload) -> tuple[list[str], str, set[str]]:
    _check("compared", workload, answer)
    if not workload.stream:
        response = json.loads(answer.content)
        return [], response["output"][0]["content"][0]["text"], set(response)
    messages = [message.split(b"\ndata: ") for message in answer.content.split(b"\n\n")]
    events = [json.loads(message[1]) for message in messages if len(message) == 2]
    kinds = [event["type"] for event in events]
    response = events[-1]["response"]
    return kinds, "".join(event.get("delta", "") for event in events), set(response)
