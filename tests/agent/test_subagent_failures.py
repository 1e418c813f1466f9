"""Runs of subagents whose ledger fails, or that somebody resumes alone: no effect happens under another key."""

import asyncio

import pytest

from antiphon import (
    AntiphonError,
    InvalidRequest,
    Limits,
    Tool,
    ToolContext,
    tool,
)
from antiphon.errors import ServerError
from antiphon.ledger import Ledger
from antiphon.store.ledger import MemoryLedger
from support.idle_clock import pass_time
from support.scripted_model import ScriptedModel, call

PAY = call("pay", {"amount": 5}, "call_p")
ASK = call("expert", {"input": "Pay."}, "call_e")


def make_pay(keys: list[str], **options: object) -> Tool:
    @tool(**options)  # type: ignore[call-overload]
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        return f"paid {amount}"

    return pay


class FailingLedger(MemoryLedger):
    """A ledger that fails to write the next entry, or to read the next run, that matches a text."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.fails_at: bytes | None = None
        self.fails_to_read = ""
        self._error = error

    async def append(self, run_id: str, number: int, entry: bytes, **options: object) -> None:  # type: ignore[override]
        if self.fails_at is not None and self.fails_at in entry:
            self.fails_at = None
            raise self._error
        await super().append(run_id, number, entry, **options)  # type: ignore[arg-type]

    async def read(self, run_id: str) -> list[bytes]:
        if self.fails_to_read and self.fails_to_read in run_id:
            self.fails_to_read = ""
            raise self._error
        return list(await super().read(run_id))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "error", [ServerError("The disk is full."), OSError("The disk is full.")], ids=["of a store", "other"]
)
async def test_failed_write_in_a_subagent_stops_the_whole_run(
    in_process: ScriptedModel, depth: int, error: Exception
) -> None:
    """As an error result, it would make the model call the subagent again, under another key."""
    keys: list[str] = []
    ledger = FailingLedger(error)
    ledger.fails_at = b'"paid 5"'
    in_process.set_answers(*[[ASK]] * depth, [PAY], [ASK], [ASK], [PAY], *["Done."] * 9)
    agent = in_process.agent(tools=[make_pay(keys)])
    for _ in range(depth):
        agent = in_process.agent(tools=[agent.as_tool("expert", "Pays.")])
    try:
        outcome = await agent.run("Go.", ledger=ledger, run_id="run_1")
        assert outcome.kind == "failed"
    except (AntiphonError, OSError):
        pass
    assert len(keys) == 1
    in_process.set_answers(*["Done."] * 9)
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, [each.name for each in outcome.pending]) == ("needs_approval", ["pay"])
    outcome = await agent.resume("run_1", approvals={outcome.pending[0].call_id: True}, ledger=ledger)
    assert (outcome.kind, len(keys), len(set(keys))) == ("final", 2, 1)


async def test_unreadable_subagent_run_stops_the_whole_run(in_process: ScriptedModel) -> None:
    keys: list[str] = []
    ledger = FailingLedger(ServerError("The ledger is locked."))
    ledger.fails_at = b'"paid 5"'
    in_process.set_answers([ASK], [PAY], *["Done."] * 9)
    expert = in_process.agent(tools=[make_pay(keys)])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    assert (await agent.run("Go.", ledger=ledger, run_id="run_1")).kind == "failed"
    in_process.set_answers([ASK], [PAY], *["Done."] * 9)
    ledger.fails_to_read = "run_1:"
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, len(keys)) == ("failed", 1)
    outcome = await agent.resume("run_1", ledger=ledger)
    assert (outcome.kind, len(keys)) == ("needs_approval", 1)


async def test_parent_reads_which_calls_a_deadline_of_the_subagent_interrupted(in_process: ScriptedModel) -> None:
    @tool
    async def wait() -> str:
        """Wait."""
        pass_time(60)
        await asyncio.Event().wait()
        return ""

    in_process.set_answers([ASK], [call("wait")], "Done.")
    expert = in_process.agent(tools=[wait], limits=Limits(seconds=60))
    outcome = await in_process.agent(tools=[expert.as_tool("expert", "Pays.")]).run("Go.")
    assert "whether they have had an effect is not known: wait({})" in outcome.history[-2]["output"]


@pytest.mark.parametrize("force", [False, True])
async def test_run_of_a_subagent_is_not_resumed_alone(in_process: ScriptedModel, ledger: Ledger, force: bool) -> None:
    keys: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    @tool(on_interrupt="retry")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        begun.set()
        await go.wait()
        return "paid"

    in_process.set_answers([ASK], [PAY], *["Done."] * 9)
    expert = in_process.agent(tools=[pay])
    agent = in_process.agent(tools=[expert.as_tool("expert", "Pays.")])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await begun.wait()
    async with asyncio.timeout(5):
        with pytest.raises(InvalidRequest, match="is of a subagent: resume the run 'run_1'"):
            await expert.resume("run_1:1:0", ledger=ledger, force=force)
    go.set()
    assert ((await running).kind, len(keys)) == ("final", 1)
