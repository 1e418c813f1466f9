"""Agents that work for others: called as a tool, each call with a run of its own."""

from contextlib import aclosing
from typing import Protocol

import msgspec

from antiphon.agent.budget import Budget, Share
from antiphon.agent.entries import Judgement
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.loop import RunEvents
from antiphon.agent.outcome import Outcome, RunEnded, ToolStarted
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ApprovalRequired, ToolContext, ToolInvocation, ToolResult, UsageCost
from antiphon.tools.executor import make_error_result

Verdict = bool | str
"""Whether a call may be made; a text is a no, with the reason for the model."""


class AgentContext(ToolContext, frozen=True, kw_only=True):
    """The context of a call within a run. What an agent does for it is kept in the same ledger, and paid from there."""

    journal: Journal
    budget: Budget
    ledger: Ledger | None = None


class Worker(Protocol):
    """What is needed of an agent."""

    def run_stream(
        self, task: str, *, durable: Ledger | None = None, run_id: str | None = None, share: Share | None = None
    ) -> RunEvents: ...

    def resume_stream(
        self,
        run: str | bytes,
        *,
        approvals: dict[str, Verdict] | None = None,
        durable: Ledger | None = None,
        share: Share | None = None,
    ) -> RunEvents: ...

    async def close(self) -> None: ...


class _Asked(msgspec.Struct):
    input: str


class Delegate:
    """What is called in place of a function. Calls of the agent that need approval wait for it in the run above."""

    def __init__(self, agent: Worker) -> None:
        self.agent = agent

    async def __call__(self, arguments: str, context: ToolContext) -> ToolResult:
        asked: str = read_json(arguments or "{}", _Asked).input
        ledger = context.ledger if isinstance(context, AgentContext) else None
        outcome = await _watch(await self._work(asked, context, ledger), context)
        if outcome.kind == "needs_approval":
            pending = (_rename(call, context) for call in outcome.pending)
            raise ApprovalRequired(tuple(pending), outcome.state if ledger is None else None)
        spent = UsageCost(outcome.usage, outcome.cost)
        if outcome.kind == "final":
            return ToolResult(outcome.text, spent=spent)
        reason = outcome.error.message if outcome.error is not None else outcome.text or "it has said nothing."
        return msgspec.structs.replace(make_error_result(f"The agent ended with {outcome.kind}: {reason}"), spent=spent)

    async def _work(self, asked: str, context: ToolContext, ledger: Ledger | None) -> RunEvents:
        # One run for each call, however often that is made.
        run_id = context.idempotency_key
        begun = await _find(run_id, context, ledger)
        share = Share(context.budget, context.call_id) if isinstance(context, AgentContext) else None
        if begun is None:
            return self.agent.run_stream(asked, durable=ledger, run_id=run_id, share=share)
        state: str | bytes = begun.pack() if ledger is None else run_id
        approvals = _find_verdicts(begun, context)
        return self.agent.resume_stream(state, approvals=approvals, durable=ledger, share=share)


async def _find(run_id: str, context: ToolContext, ledger: Ledger | None) -> Journal | None:
    """The run of an earlier attempt at this call, if there was one."""
    if ledger is not None:
        return await load(run_id, ledger) if await ledger.read(run_id) else None
    paused = context.journal.state.paused.get(context.call_id) if isinstance(context, AgentContext) else None
    return None if paused is None or paused.state is None else unpack(paused.state)


def _find_verdicts(begun: Journal, context: ToolContext) -> dict[str, Verdict]:
    """What was said above about calls that still wait for it here."""
    judged = context.journal.state.judged if isinstance(context, AgentContext) else {}
    prefix = f"{context.call_id}/"
    here = {name.removeprefix(prefix): each for name, each in judged.items() if name.startswith(prefix)}
    return {call_id: _as_verdict(each) for call_id, each in here.items() if begun.state.waits_for(call_id)}


def judge(call_id: str, verdict: Verdict) -> Judgement:
    return Judgement(call_id, verdict is True, verdict if isinstance(verdict, str) else "")


def _as_verdict(judgement: Judgement) -> Verdict:
    return judgement.approved or judgement.reason


def _rename(call: ToolInvocation, context: ToolContext) -> ToolInvocation:
    """A call of the agent, as the run above knows it."""
    return ToolInvocation(f"{context.call_id}/{call.call_id}", call.name, call.arguments)


async def _watch(events: RunEvents, context: ToolContext) -> Outcome:
    outcome: Outcome | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ToolStarted):
                context.report(f"calls {event.call.name}")
            elif isinstance(event, RunEnded):
                outcome = event.outcome
    assert outcome is not None, "a run ends by saying how"
    return outcome
