"""Owners of runs: a live run cannot be resumed elsewhere, and a process that has lost its run has no further effect."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from antiphon import RunTaken, Tool, tool
from antiphon.agent import ownership
from antiphon.agent.ownership import is_owner_gone, take_ownership
from antiphon.ledger import Holder, Ledger
from antiphon.store.ledger import MemoryLedger
from support.scripted_model import ScriptedModel, call


class Clock:
    time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


class Gate:
    """A tool that waits in its first call, and the numbers that it was called with."""

    def __init__(self) -> None:
        self.begun, self.release = asyncio.Event(), asyncio.Event()
        self.effects: list[int] = []

    def make_tool(self) -> Tool:
        @tool(on_interrupt="retry")
        async def act(number: int) -> str:
            """Have an effect."""
            self.effects.append(number)
            self.begun.set()
            if number == 1:
                await self.release.wait()
            return "Done."

        return act


ACT = [[call("act", {"number": 1})], [call("act", {"number": 2})], "Done."]


async def test_live_run_cannot_be_resumed(in_process: ScriptedModel, ledger: Ledger) -> None:
    gate = Gate()
    in_process.set_answers(*ACT)
    agent = in_process.agent(tools=[gate.make_tool()])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await gate.begun.wait()
    with pytest.raises(RunTaken, match="Another process is executing the run 'run_1'") as raised:
        await agent.resume("run_1", ledger=ledger)
    assert (raised.value.status, raised.value.code, raised.value.param) == (409, "run_taken", "run_id")
    gate.release.set()
    assert (await running).kind == "final"
    assert gate.effects == [1, 2]
    assert (await agent.resume("run_1", ledger=ledger)).kind == "final"


async def test_process_that_lost_its_run_stops_before_the_next_effect(
    in_process: ScriptedModel, ledger: Ledger
) -> None:
    first, second = Gate(), Gate()
    second.release.set()
    in_process.set_answers(ACT[0], ACT[1], "Done.")
    running = asyncio.ensure_future(
        in_process.agent(tools=[first.make_tool()]).run("Go.", ledger=ledger, run_id="run_1")
    )
    await first.begun.wait()
    other = in_process.agent(tools=[second.make_tool()])
    outcome = await other.resume("run_1", ledger=ledger, force=True)
    first.release.set()
    with pytest.raises(RunTaken, match="run_1"):
        await running
    assert (outcome.kind, first.effects, second.effects) == ("final", [1], [1, 2])
    assert (await other.resume("run_1", ledger=ledger)).kind == "final"


async def test_subagent_of_a_lost_run_has_no_further_effect(in_process: ScriptedModel, ledger: Ledger) -> None:
    gate = Gate()
    in_process.set_answers([call("expert", {"input": "Act."}, "call_e")], *ACT)
    expert = in_process.agent(name="expert", tools=[gate.make_tool()])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Acts.")])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await gate.begun.wait()
    taken = await take_ownership(ledger, "run_1", force=True)
    gate.release.set()
    with pytest.raises(RunTaken, match="run_1"):
        await running
    assert gate.effects == [1]
    await taken.release()


async def test_retry_of_a_tool_checks_the_owner(in_process: ScriptedModel, ledger: Ledger) -> None:
    attempts: list[int] = []

    @tool(retries=3)
    async def fail() -> str:
        """Fail."""
        attempts.append(len(attempts))
        await ledger.hold("run_1", "another", 60, instead_of=await find_owner(ledger))
        raise ValueError("no")

    in_process.set_answers([call("fail")], "Done.")
    with pytest.raises(RunTaken):
        await in_process.agent(tools=[fail]).run("Go.", ledger=ledger, run_id="run_1")
    assert attempts == [0]


async def find_owner(ledger: Ledger) -> str:
    lease = await ledger.find_lease("run_1")
    assert lease is not None
    return lease.owner


async def test_ended_run_has_no_owner(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers("Done.")
    await in_process.agent().run("Go.", ledger=ledger, run_id="run_1")
    assert await find_owner(ledger) == ""
    assert [summary.lease for summary in await ledger.runs()] == [None]


async def test_expired_lease_can_be_taken() -> None:
    clock = Clock()
    ledger = MemoryLedger(now=clock)
    await ledger.append("run_1", 0, b"")
    assert await ledger.hold("run_1", "another machine/1/2/3", 30)
    with pytest.raises(RunTaken):
        await take_ownership(ledger, "run_1")
    clock.time += 31
    taken = await take_ownership(ledger, "run_1")
    assert taken.idle_seconds == 31
    await taken.release()


async def test_lease_is_renewed_while_the_run_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 0.03)
    renewed = asyncio.Event()

    class Counting(MemoryLedger):
        count = 0

        async def hold(self, *arguments: Any, **options: Any) -> bool:
            self.count += 1
            if self.count == 4:
                renewed.set()
            return await super().hold(*arguments, **options)

    ledger = Counting()
    await ledger.append("run_1", 0, b"")
    taken = await take_ownership(ledger, "run_1")
    await asyncio.wait_for(renewed.wait(), 20)
    await taken.check()
    await taken.release()
    with pytest.raises(RunTaken):
        await taken.check()


async def test_entry_of_another_owner_is_not_written(ledger: Ledger) -> None:
    await ledger.append("run_1", 0, b"start")
    assert await ledger.hold("run_1", "first", 60)
    await ledger.append("run_1", 1, b"one", holder=Holder("run_1", "first"))
    assert not await ledger.hold("run_1", "second", 60)
    assert await ledger.hold("run_1", "second", 60, instead_of="first")
    with pytest.raises(RunTaken):
        await ledger.append("run_1", 2, b"two", holder=Holder("run_1", "first"))
    with pytest.raises(RunTaken):
        await ledger.append("run_1:1:0", 0, b"of a subagent", holder=Holder("run_1", "first"))
    assert [list(await ledger.read(run_id)) for run_id in ("run_1", "run_1:1:0")] == [[b"start", b"one"], []]


def test_owner_whose_process_has_ended_is_gone() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", "from antiphon.agent.ownership import _make_owner; print(_make_owner())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert is_owner_gone(owner)


def test_owner_on_another_machine_is_not_known_to_be_gone() -> None:
    assert not is_owner_gone(f"another machine/{os.getpid()}/1/2")
    assert not is_owner_gone("not an owner")


async def test_owner_in_this_process_is_gone_when_it_leaves_the_run() -> None:
    ledger = MemoryLedger()
    await ledger.append("run_1", 0, b"")
    taken = await take_ownership(ledger, "run_1")
    assert not is_owner_gone(taken.holder.owner)
    await taken.release()
    assert is_owner_gone(taken.holder.owner)


class SlowLedger(MemoryLedger):
    """A ledger whose lease is visible to others before `hold` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def hold(self, run_id: str, owner: str, seconds: float, *, instead_of: str = "") -> bool:
        is_held = await super().hold(run_id, owner, seconds, instead_of=instead_of)
        self.is_held.set()
        await self.goes_on.wait()
        return is_held


async def test_run_that_is_being_taken_is_not_free() -> None:
    ledger = SlowLedger()
    await ledger.append("run_1", 0, b"{}")
    taking = asyncio.ensure_future(take_ownership(ledger, "run_1"))
    await ledger.is_held.wait()
    with pytest.raises(RunTaken):
        await take_ownership(ledger, "run_1")
    ledger.goes_on.set()
    await (await taking).release()
