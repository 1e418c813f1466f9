"""The queue in front of a model: order, limits, and slots that are never lost."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import AntiphonError, RateLimited, Unavailable
from antiphon.turn_queue import BACKGROUND_SHARE, QueueLimits, Slot, TurnQueue


class Bench:
    """A queue with a clock, and turns that start and end by command. `order` has the turns that got a slot."""

    def __init__(self, slots: int = 1, **limits: Any) -> None:
        self.time = 0.0
        self.queue = TurnQueue(slots, now=lambda: self.time)
        self.queue.limits = QueueLimits(**limits)
        self.order: list[str] = []
        self.held: list[Slot] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, project: str, name: str = "", **options: Any) -> asyncio.Task[None]:
        name = name or project
        task = self.tasks[name] = asyncio.create_task(self._take(project, name, **options))
        await asyncio.sleep(0)
        return task

    async def _take(self, project: str, name: str, **options: Any) -> None:
        slot = await self.queue.acquire(project, **options)
        self.order.append(name)
        self.held.append(slot)

    async def end(self, *, after: float = 0.0) -> None:
        """End the turn that began first."""
        self.time += after
        self.held.pop(0).release()
        await asyncio.sleep(0)

    async def drain(self) -> list[str]:
        """End all turns, one after the other. Return the order in which they began."""
        while self.held:
            await self.end()
        return self.order


async def test_free_slots_are_given_at_once() -> None:
    bench = Bench(slots=2)
    await bench.ask("a", "1")
    await bench.ask("b", "2")
    await bench.ask("a", "3")
    assert (bench.order, bench.queue.running, bench.queue.waiting) == (["1", "2"], 2, 1)
    assert await bench.drain() == ["1", "2", "3"]
    assert (bench.queue.running, bench.queue.waiting) == (0, 0)


async def test_projects_take_turns_and_a_project_keeps_its_order() -> None:
    bench = Bench()
    for index in range(6):
        await bench.ask("a", f"a{index}")
    await bench.ask("b", "b0")
    await bench.ask("b", "b1")
    await bench.ask("c", "c0")
    assert await bench.drain() == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]


async def test_project_that_comes_back_waits_for_one_turn_of_each_other() -> None:
    bench = Bench()
    for index in range(4):
        await bench.ask("a", f"a{index}")
    for index in range(3):
        await bench.ask("b", f"b{index}")  # only after its last turn has ended
        await bench.end()
        await bench.end()
    assert bench.order == ["a0", "a1", "b0", "a2", "b1", "a3", "b2"]


async def test_heavy_turns_count_more() -> None:
    bench = Bench()
    await bench.ask("z", "first")
    for index in range(3):
        await bench.ask("heavy", f"h{index}", weight=300)
        await bench.ask("light", f"l{index}", weight=100)
    await bench.ask("light", "l3", weight=100)
    assert await bench.drain() == ["first", "l0", "l1", "h0", "l2", "l3", "h1", "h2"]


async def test_foreground_goes_first_and_background_gets_its_share() -> None:
    bench = Bench()
    await bench.ask("z", "first")
    for index in range(3):
        await bench.ask("b", f"b{index}", background=True)
    for index in range(2 * BACKGROUND_SHARE):
        await bench.ask("f", f"f{index}")
    order = (await bench.drain())[1:]
    share = BACKGROUND_SHARE - 1
    assert [order.index(f"b{index}") for index in range(2)] == [share, 2 * share + 1]
    assert len(order) == 2 * BACKGROUND_SHARE + 3


async def test_full_project_is_refused_at_once_and_others_are_not() -> None:
    bench = Bench(queued=3, queued_per_project=2)
    for name in ("running", "w1", "w2"):
        await bench.ask("a", name)
    refused = await bench.ask("a", "too many")
    with pytest.raises(RateLimited, match="`queued_per_project`") as caught:
        refused.result()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    await bench.ask("b")
    refused = await bench.ask("c")
    with pytest.raises(Unavailable, match="`queued`") as overloaded:
        refused.result()
    assert (overloaded.value.status, overloaded.value.code) == (503, "server_overloaded")
    assert await bench.drain() == ["running", "w1", "b", "w2"]


async def test_background_turns_are_not_refused_and_do_not_use_up_the_queue() -> None:
    bench = Bench(queued=1, queued_per_project=1, seconds=0.01)
    await bench.ask("a", "running")
    for index in range(5):
        await bench.ask("a", f"b{index}", background=True)
    await bench.ask("a", "f")
    assert bench.queue.waiting == 6
    bench.tasks["f"].cancel()
    assert await bench.drain() == ["running", *(f"b{index}" for index in range(5))]


async def test_retry_after_is_the_time_in_which_the_queue_empties() -> None:
    bench = Bench(slots=2, queued=8, queued_per_project=4)
    for _ in range(2):
        await bench.ask("a", "earlier")
        await bench.end(after=6)
    for index in range(6):
        await bench.ask("a", f"a{index}")
    for index in range(4):
        await bench.ask("b", f"b{index}")
    refusals: list[AntiphonError] = []
    for project in "abc":
        error = (await bench.ask(project, "refused")).exception()
        assert isinstance(error, AntiphonError)
        refusals.append(error)
    # A turn takes 6 s, and two run at once. The four turns of a project wait for four of the other one.
    assert [error.retry_after for error in refusals] == [24, 24, 24]
    assert all("Retry in 24 s." in error.message for error in refusals)
    bench.time += 10  # no turn has ended for longer than usual
    assert bench.queue.estimate_seconds(8) == 80


async def test_retry_after_is_between_a_second_and_the_longest_wait() -> None:
    bench = Bench(queued_per_project=1, seconds=30)
    assert (bench.queue.estimate_seconds(1), bench.queue.estimate_seconds(10**9)) == (30, 30)
    await bench.ask("a")
    assert bench.queue.estimate_seconds(1) == 1


async def test_queue_for_preparation_counts_the_turns_of_the_next_queue_too() -> None:
    bench = Bench(queued=4, queued_per_project=2)
    preparing = TurnQueue(1, ahead_of=bench.queue, now=lambda: bench.time)
    slot = await preparing.acquire("a")
    await bench.ask("a", "earlier")
    await bench.end(after=7)
    await bench.ask("a", "running")
    await bench.ask("a", "waiting")
    prepared = asyncio.create_task(preparing.acquire("a"))
    await asyncio.sleep(0)
    with pytest.raises(RateLimited, match="wait for the model: 2,") as caught:
        await preparing.acquire("a")
    assert caught.value.retry_after == 14  # by the slower queue
    bench.queue.check_room("a")  # it has room for the turn that is being prepared
    slot.release()
    (await prepared).release()
    await bench.ask("a", "prepared")
    with pytest.raises(RateLimited):
        bench.queue.check_room("a")
    assert await bench.drain() == ["earlier", "running", "waiting", "prepared"]


async def test_wait_ends_at_the_deadline_and_frees_the_position() -> None:
    bench = Bench(seconds=0.01, queued=1)
    await bench.ask("a", "running")
    late = await bench.ask("a", "late")
    await asyncio.wait({late})
    with pytest.raises(Unavailable, match=r"waited 0\.01 seconds .*`queue_seconds`") as caught:
        late.result()
    assert caught.value.code == "server_overloaded"
    assert bench.queue.waiting == 0
    bench.queue.limits = QueueLimits()
    await bench.ask("a", "next")
    assert await bench.drain() == ["running", "next"]


async def test_cancelled_turn_leaves_the_queue_at_once() -> None:
    bench = Bench(queued_per_project=1)
    await bench.ask("a", "running")
    gone = await bench.ask("a", "gone")
    gone.cancel()
    await asyncio.wait({gone})
    assert bench.queue.waiting == 0
    await bench.ask("a", "next")
    assert await bench.drain() == ["running", "next"]


async def test_slot_granted_to_a_turn_that_is_cancelled_goes_to_the_next() -> None:
    bench = Bench()
    for name in ("running", "gone", "next"):
        await bench.ask("a", name)
    slot = bench.held.pop()
    slot.release()
    bench.tasks["gone"].cancel()  # after the grant, before its task has run
    await asyncio.wait({bench.tasks["gone"]})
    await asyncio.sleep(0)
    assert bench.order == ["running", "next"]
    slot.release()  # a second release changes nothing
    assert bench.queue.running == 1


async def test_closed_queue_refuses_waiting_and_later_turns() -> None:
    bench = Bench()
    await bench.ask("a", "running")
    tasks = [await bench.ask("a", "w"), await bench.ask("b", "b", background=True)]
    bench.queue.close("The model is shutting down.")
    tasks.append(await bench.ask("c", "late"))
    for task in tasks:
        await asyncio.wait({task})
        with pytest.raises(Unavailable, match="shutting down"):
            task.result()


Step = tuple[str, Any]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 5))),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("settle"), st.none()),
    ),
    max_size=60,
)


@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3), STEPS)
def test_queue_is_bounded_work_conserving_in_order_and_loses_no_slot(
    slots: int, queued: int, per_project: int, steps: list[Step]
) -> None:
    asyncio.run(_check(slots, queued, per_project, steps))


async def _check(slots: int, queued: int, per_project: int, steps: list[Step]) -> None:
    bench = Bench(slots, queued=queued, queued_per_project=per_project)
    queue = bench.queue
    requested: dict[str, tuple[str, bool]] = {}
    for number, (step, argument) in enumerate(steps):
        if step == "ask":
            project, background, weight = argument
            name = f"{number}"
            requested[name] = project, background
            await bench.ask(project, name, background=background, weight=weight)
        elif step == "end" and bench.held:
            bench.held.pop(min(argument, len(bench.held) - 1)).release()
        elif step == "cancel" and bench.tasks:
            list(bench.tasks.values())[argument % len(bench.tasks)].cancel()
        elif step == "settle":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        waiting = Counter(requested[name] for name, task in bench.tasks.items() if not task.done())
        assert queue.running <= slots
        assert not queue.waiting or queue.running == slots
        if step == "settle":
            foreground = {project: count for (project, background), count in waiting.items() if not background}
            assert sum(foreground.values()) <= queued
            assert all(count <= per_project for count in foreground.values())
    for _ in range(len(steps) + 2):
        await asyncio.sleep(0)
        while bench.held:
            await bench.end()
    assert (queue.running, queue.waiting) == (0, 0)
    assert all(task.done() for task in bench.tasks.values())
    for kind in set(requested.values()):
        mine = [int(name) for name in bench.order if requested[name] == kind]
        assert mine == sorted(mine)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.integers(1, 50))
def test_no_project_is_starved_by_light_turns_of_others(weights: list[int], heavy: int) -> None:
    async def check() -> None:
        bench = Bench()
        await bench.ask("first")
        for index, weight in enumerate(weights):
            for turn in range(heavy + 1):
                await bench.ask(f"p{index}", f"p{index}-{turn}", weight=weight)
        await bench.ask("heavy", weight=heavy)
        order = await bench.drain()
        before = Counter(name.split("-")[0] for name in order[1 : order.index("heavy")])
        assert all(before[f"p{index}"] * weight <= heavy for index, weight in enumerate(weights))

    asyncio.run(check())
