"""Agents as tools of other agents. Each call of such a tool is a run of the subagent."""

from typing import Protocol

import msgspec

from antiphon.agent.approvals import Approval, to_approval
from antiphon.agent.budget import Budget, ParentBudget
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.outcome import RunEvent, RunEvents, ToolStarted, read_outcome
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ApprovalRequired, ToolContext, ToolInvocation, ToolResult, UsageCost
from antiphon.tools.executor import make_error_result


class AgentContext(ToolContext, frozen=True, kw_only=True):
    """The context of a call within a run. A subagent uses the ledger and the budget of that run."""

    journal: Journal
    budget: Budget
    ledger: Ledger | None = None


class Subagent(Protocol):
    """The part of `Agent` that a parent run uses."""

    def run_stream(
        self,
        task: str,
        *,
        durable: Ledger | None = None,
        run_id: str | None = None,
        parent_budget: ParentBudget | None = None,
    ) -> RunEvents: ...

    def resume_stream(
        self,
        run: str | bytes,
        *,
        approvals: dict[str, Approval] | None = None,
        durable: Ledger | None = None,
        parent_budget: ParentBudget | None = None,
    ) -> RunEvents: ...

    async def close(self) -> None: ...


class _Arguments(msgspec.Struct):
    input: str


class SubagentTool:
    """The `invoke` of a tool that runs an agent. Its calls that need approval wait for it in the parent run."""

    def __init__(self, agent: Subagent) -> None:
        self.agent = agent

    async def __call__(self, arguments: str, context: ToolContext) -> ToolResult:
        task: str = read_json(arguments or "{}", _Arguments).input
        ledger = context.ledger if isinstance(context, AgentContext) else None

        def report_call(event: RunEvent) -> None:
            if isinstance(event, ToolStarted):
                context.report(f"calls {event.call.name}")

        outcome = await read_outcome(await self._start(task, context, ledger), report_call)
        if outcome.kind == "needs_approval":
            pending = (_add_prefix(call, context) for call in outcome.pending)
            raise ApprovalRequired(tuple(pending), outcome.state if ledger is None else None)
        spent = UsageCost(outcome.usage, outcome.cost)
        if outcome.kind == "final":
            return ToolResult(outcome.text, spent=spent)
        reason = outcome.error.message if outcome.error is not None else outcome.text or "it gave no answer."
        failure = make_error_result(f"The agent ended with {outcome.kind}: {reason}")
        return msgspec.structs.replace(failure, spent=spent)

    async def _start(self, task: str, context: ToolContext, ledger: Ledger | None) -> RunEvents:
        """Start the run of this call, or resume it if an earlier attempt has started it."""
        run_id = context.idempotency_key
        started = await _find_run(run_id, context, ledger)
        parent = ParentBudget(context.budget, context.call_id) if isinstance(context, AgentContext) else None
        if started is None:
            return self.agent.run_stream(task, durable=ledger, run_id=run_id, parent_budget=parent)
        run: str | bytes = started.pack() if ledger is None else run_id
        approvals = _find_approvals(started, context)
        return self.agent.resume_stream(run, approvals=approvals, durable=ledger, parent_budget=parent)


async def _find_run(run_id: str, context: ToolContext, ledger: Ledger | None) -> Journal | None:
    """Return the run of an earlier attempt at this call, if there was one."""
    if ledger is not None:
        return await load(run_id, ledger) if await ledger.read(run_id) else None
    paused = context.journal.state.paused_calls.get(context.call_id) if isinstance(context, AgentContext) else None
    return None if paused is None or paused.state is None else unpack(paused.state)


def _find_approvals(started: Journal, context: ToolContext) -> dict[str, Approval]:
    """Return the verdicts in the parent run on calls of the subagent that still wait for one."""
    verdicts = context.journal.state.verdicts if isinstance(context, AgentContext) else {}
    prefix = f"{context.call_id}/"
    own = {name.removeprefix(prefix): each for name, each in verdicts.items() if name.startswith(prefix)}
    return {call_id: to_approval(each) for call_id, each in own.items() if started.state.awaits_verdict(call_id)}


def _add_prefix(call: ToolInvocation, context: ToolContext) -> ToolInvocation:
    """Return a call of the subagent with the id that it has in the parent run."""
    return ToolInvocation(f"{context.call_id}/{call.call_id}", call.name, call.arguments)
