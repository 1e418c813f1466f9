"""The budget for bodies of requests and responses."""

import asyncio
import contextlib
from typing import Any

import pytest

from antiphon.errors import Unavailable
from antiphon.server import body_budget
from antiphon.server.body_budget import FREE_BYTES, BodyBudget, BodyDropped
from antiphon.server.http import HttpRequest, Message
from antiphon.server.request_body import read_body
from antiphon.server.response_body import SharedBody


def chunk(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def test_first_bytes_of_each_body_are_free() -> None:
    budget = BodyBudget(1)
    shares = [budget.open() for _ in range(100)]
    assert all(share.resize(FREE_BYTES) for share in shares)
    assert budget.used == 0


def test_share_is_returned_when_it_is_closed_or_shrinks() -> None:
    budget = BodyBudget(10)
    share = budget.open()
    assert share.resize(FREE_BYTES + 10)
    assert not budget.open().resize(FREE_BYTES + 1)
    assert share.resize(FREE_BYTES + 4)
    assert budget.used == 4
    share.close()
    assert budget.used == 0


def test_failed_resize_changes_nothing() -> None:
    budget = BodyBudget(10)
    share = budget.open()
    assert share.resize(FREE_BYTES + 6)
    assert not share.resize(FREE_BYTES + 11)
    assert (budget.used, share.size) == (6, FREE_BYTES + 6)


def test_announced_length_is_checked_and_not_counted() -> None:
    budget = BodyBudget(10)
    budget.check(FREE_BYTES + 10)
    with pytest.raises(Unavailable) as caught:
        budget.check(FREE_BYTES + 11)
    assert (caught.value.code, caught.value.retry_after, budget.used) == ("server_overloaded", 5, 0)


def test_slow_body_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(1_000_000)
    dropped: list[str] = []
    sizes = {"slow": 100_000, "slower": 90_000, "fast": 800_000}
    shares = {name: budget.open(lambda name=name: dropped.append(name)) for name in sizes}  # type: ignore[misc]
    assert all(share.resize(FREE_BYTES + sizes[name]) for name, share in shares.items())
    other = budget.open()
    assert not other.resize(FREE_BYTES + 50_000), "no body is old enough"
    now = 6.0
    assert other.resize(FREE_BYTES + 50_000)
    assert dropped == ["slower"]
    assert not shares["slower"].resize(FREE_BYTES)
    assert not budget.open().resize(FREE_BYTES + 900_000)
    assert dropped == ["slower"], "a fast body is not dropped, and no other in vain"
    assert budget.open().resize(FREE_BYTES + 150_000)
    assert dropped == ["slower", "slow"]


def test_body_without_enough_room_drops_no_slow_body(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(100)
    dropped: list[str] = []
    held, slow = budget.open(project="p"), budget.open(lambda: dropped.append("slow"))
    assert held.resize(FREE_BYTES + 60)
    assert slow.resize(FREE_BYTES + 40)
    now = 6.0
    assert not budget.open().resize(FREE_BYTES + 41)
    assert not budget.open(project="p").resize(FREE_BYTES + 16), "the project has three quarters"
    assert (dropped, budget.used) == ([], 100)
    assert budget.open(project="p").resize(FREE_BYTES + 15)
    assert (dropped, budget.used) == (["slow"], 75)


def test_last_body_of_a_project_gets_room_of_its_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(100)
    dropped: list[str] = []
    assert budget.open(lambda: dropped.append("slow"), project="p").resize(FREE_BYTES + 10)
    now = 6.0
    budget.check(FREE_BYTES + 90, "p")
    assert dropped == []
    assert budget.open(project="p").resize(FREE_BYTES + 90)
    assert (dropped, budget.used) == (["slow"], 90)


def test_announced_length_drops_no_slow_body(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(10)
    dropped: list[str] = []
    slow = budget.open(lambda: dropped.append("slow"))
    assert slow.resize(FREE_BYTES + 10)
    with pytest.raises(Unavailable):
        budget.check(FREE_BYTES + 10)
    now = 10.0
    budget.check(FREE_BYTES + 10)
    assert (dropped, budget.used) == ([], 10)
    assert budget.open().resize(FREE_BYTES + 1)
    assert (dropped, budget.used) == (["slow"], 1)


def test_complete_body_without_a_drop_function_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(10)
    assert budget.open().resize(FREE_BYTES + 10)
    now = 1000.0
    assert not budget.open().resize(FREE_BYTES + 1)


async def test_body_beyond_the_budget_is_refused_and_returned(make_channel: Any) -> None:
    channel = make_channel(chunk(b"x" * FREE_BYTES), chunk(b"x" * 6), chunk(b"x" * 6), chunk(b"", more=False))
    request: HttpRequest = channel.make_request()
    request.body_budget = BodyBudget(10)
    with pytest.raises(Unavailable, match=r"body_budget_bytes \(10\)"):
        await read_body(request, 10**6)
    assert request.body_budget.used == 0


async def test_dropped_body_gets_the_error_of_the_budget(make_channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "_SLOW_AFTER_SECONDS", -1.0)
    monkeypatch.setattr(body_budget, "_SLOW_BYTES_PER_SECOND", 10.0**12)
    budget = BodyBudget(10)
    request: HttpRequest = make_channel(chunk(b"x" * (FREE_BYTES + 8))).make_request()
    request.body_budget = budget
    reading = asyncio.create_task(read_body(request, 10**6))
    for _ in range(3):
        await asyncio.sleep(0)
    assert budget.used == 8
    assert budget.open().resize(FREE_BYTES + 8)
    with pytest.raises(Unavailable):
        await reading
    assert (budget.used, reading.cancelling()) == (8, 0)


async def test_cancelled_read_returns_its_share(make_channel: Any) -> None:
    budget = BodyBudget(10)
    request: HttpRequest = make_channel(chunk(b"x" * (FREE_BYTES + 8))).make_request()
    request.body_budget = budget
    reading = asyncio.create_task(read_body(request, 10**6))
    for _ in range(3):
        await asyncio.sleep(0)
    assert budget.used == 8
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert budget.used == 0


async def test_body_counts_until_its_request_is_answered(make_channel: Any) -> None:
    request: HttpRequest = make_channel(chunk(b"x" * 100_000), chunk(b"x" * 200_000, more=False)).make_request()
    request.body_budget = budget = BodyBudget(10**6)
    assert len(await read_body(request, 10**6)) == 300_000
    assert budget.used == 300_000 - FREE_BYTES
    request.release_body()
    assert budget.used == 0


async def test_body_that_arrives_at_once_counts_too(make_channel: Any) -> None:
    request: HttpRequest = make_channel(chunk(b"x" * 100_000, more=False)).make_request()
    request.body_budget = budget = BodyBudget(10**6)
    await read_body(request, 10**6)
    assert budget.used == 100_000 - FREE_BYTES


@pytest.mark.parametrize("sent", [0, 400_000])
async def test_body_of_a_slow_reader_gives_way_to_another(monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    """A body for which the server works does not, and neither does one whose client reads fast enough."""
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(1_000_000)
    working, reading, other = budget.open(), budget.open(), budget.open()
    assert working.resize(FREE_BYTES + 500_000)
    assert reading.resize(FREE_BYTES + 500_000)
    counts = iter([0])
    outcome = contextlib.nullcontext() if sent else pytest.raises(BodyDropped)
    with outcome, reading.sending(lambda: next(counts, sent)):
        now = 6.0
        assert other.resize(FREE_BYTES + 1000) is not bool(sent)
        await asyncio.sleep(0)
    assert (reading.dropped, working.dropped) == (not sent, False)


def test_project_takes_at_most_three_quarters_unless_it_has_one_body() -> None:
    budget = BodyBudget(100)
    first, second, other = (budget.open(project=project) for project in ("a", "a", "b"))
    assert first.resize(FREE_BYTES + 75)
    assert not second.resize(FREE_BYTES + 1)
    with pytest.raises(Unavailable):
        budget.check(FREE_BYTES + 1, "a")
    budget.check(FREE_BYTES + 25, "b")
    assert other.resize(FREE_BYTES + 25)
    for share in (first, second, other):
        share.close()
    assert second.resize(FREE_BYTES + 100)
    assert not first.resize(FREE_BYTES + 1)
    second.close()
    assert (budget.used, budget._by_project) == (0, {})


def test_project_beyond_its_limit_gets_no_room_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(100)
    dropped: list[str] = []
    slow = {name: budget.open(lambda name=name: dropped.append(name), project=name) for name in "ab"}  # type: ignore[misc]
    held = budget.open(project="a")
    assert held.resize(FREE_BYTES + 60)
    assert slow["a"].resize(FREE_BYTES + 10)
    assert slow["b"].resize(FREE_BYTES + 20)
    now = 10.0
    with pytest.raises(Unavailable):
        budget.check(FREE_BYTES + 20, "a")
    assert not budget.open(project="a").resize(FREE_BYTES + 20)
    assert dropped == []
    assert budget.open(project="a").resize(FREE_BYTES + 15)
    assert dropped == ["a"]


def test_required_body_counts_beyond_the_budget() -> None:
    budget = BodyBudget(10)
    share = budget.open()
    assert share.resize(FREE_BYTES + 30, is_required=True)
    assert not budget.open().resize(FREE_BYTES + 1)
    share.close()
    assert budget.used == 0


async def test_large_response_counts_until_it_is_sent(make_channel: Any) -> None:
    channel = make_channel()
    request: HttpRequest = channel.make_request()
    request.method, request.body_budget = "GET", BodyBudget(300_000)
    await request.respond(200, b"x" * 300_000)
    assert request.body_budget.used == 300_000 - FREE_BYTES
    request.release_body()
    other: HttpRequest = make_channel().make_request()
    other.method, other.body_budget = "GET", request.body_budget
    share = request.body_budget.open()
    assert share.resize(FREE_BYTES + 1)
    with pytest.raises(Unavailable, match="body_budget_bytes"):
        await other.respond(200, b"x" * 500_000)
    assert (other.status, request.body_budget.used) == (0, 1)
    other.method = "POST"
    await other.respond(200, b"x" * 500_000)
    assert (other.status, request.body_budget.used) == (200, 500_000 - FREE_BYTES + 1)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_response_larger_than_the_budget_is_sent_if_it_is_alone(make_channel: Any, is_shared: bool) -> None:
    channel = make_channel()
    request: HttpRequest = channel.make_request()
    request.method, request.body_budget = "GET", BodyBudget(300_000)
    body = b"x" * 500_000
    await (request.respond_in_parts(SharedBody(body)) if is_shared else request.respond(200, body))
    assert b"".join(message.get("body", b"") for message in channel.sent) == body
    request.release_body()
    assert request.body_budget.used == 0


async def test_shared_body_counts_once_and_is_dropped_if_all_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(body_budget.time, "monotonic", lambda: now)
    budget = BodyBudget(1_000_000)
    body = SharedBody(b"x" * 1_000_000)
    sent = [0, 0]
    outcomes: list[object] = [None, None]

    async def send(index: int) -> None:
        try:
            with body.sending(budget, "a", lambda: sent[index]):
                await asyncio.Event().wait()
        except BodyDropped as dropped:
            outcomes[index] = dropped

    tasks = [asyncio.create_task(send(index)) for index in range(2)]
    await asyncio.sleep(0)
    assert budget.used == 1_000_000 - FREE_BYTES
    now, sent[0] = 10.0, 900_000
    assert not budget.open().resize(FREE_BYTES + 100_000), "one of them reads fast enough"
    now = 100.0
    assert budget.open().resize(FREE_BYTES + 100_000)
    late = asyncio.create_task(send(0))
    await asyncio.gather(*tasks)
    assert [type(outcome) for outcome in outcomes] == [BodyDropped, BodyDropped]
    with pytest.raises(Unavailable):  # 900,000 bytes are left
        await late
    assert budget.used == 100_000
