"""Agents as tools of other agents. Each call of such a tool is a run of the subagent."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from antiphon.agent.budget import Budget, ParentRun
from antiphon.agent.entries import Verdict
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.limits import Limits
from antiphon.agent.outcome import Outcome, RunEvent, RunEvents, SubagentEvent, ToolStarted
from antiphon.agent.run_stream import read_outcome
from antiphon.agent.unresolved_calls import find_inherited
from antiphon.callbacks import call_callback
from antiphon.errors import AntiphonError
from antiphon.ledger import Ledger, LedgerFailed, RunTaken
from antiphon.protocol.json_text import read_json
from antiphon.tools.base import ApprovalRequired, MissingTool, PendingToolCall, Tool, ToolContext, ToolResult
from antiphon.tools.executor import STOP_SECONDS, make_error_result
from antiphon.tools.function import make_result

logger = logging.getLogger(__name__)

ReadOutput = Callable[[Outcome[Any]], Any | Awaitable[Any]]


class AgentContext(ToolContext[Any], frozen=True, kw_only=True):
    """The context of a call within a run. A subagent uses the ledger and the budget of that run."""

    journal: Journal
    budget: Budget
    ledger: Ledger | None = None


class Subagent(Protocol):
    """The part of `Agent` that a parent run uses."""

    def find_stop_seconds(self, found: dict[object, float]) -> float: ...

    def run_subagent(
        self,
        task: str,
        *,
        deps: Any,
        ledger: Ledger | None,
        run_id: str,
        parent: ParentRun,
        limits: Limits | None = None,
    ) -> RunEvents: ...

    def resume_subagent(
        self, run: str | bytes, verdicts: Sequence[Verdict], *, deps: Any, ledger: Ledger | None, parent: ParentRun
    ) -> RunEvents: ...


class _Arguments(msgspec.Struct):
    input: str


class SubagentTool:
    """The `invoke` of a tool that runs an agent. Its calls that need approval wait for it in the parent run.

    `limits` replace those of the agent. `read_output` makes the result of the call from the outcome; the default is its
    text.
    """

    def __init__(self, agent: Subagent, *, limits: Limits | None = None, read_output: ReadOutput | None = None) -> None:
        self.agent = agent
        self._limits = limits
        self._read_output = read_output

    @property
    def stop_seconds(self) -> float:
        """The time to wait for the agent after a cancellation: longer than it waits for its own tools."""
        return self.find_stop_seconds({})

    def find_stop_seconds(self, found: dict[object, float]) -> float:
        """Return the `stop_seconds`. `found` has those of the agents that were seen before."""
        return STOP_SECONDS + self.agent.find_stop_seconds(found)

    async def __call__(self, arguments: str, context: ToolContext[Any]) -> ToolResult:
        if not isinstance(context, AgentContext):
            raise TypeError("an agent can be a tool of an agent only")
        task: str = read_json(arguments or "{}", _Arguments).input

        def forward(event: RunEvent) -> None:
            context.emit(SubagentEvent(context.run_id, context.call_id, event))
            if isinstance(event, ToolStarted):
                context.report(f"calls {event.call.name}")

        outcome = await self._run(task, context, forward)
        if outcome.kind == "needs_approval":
            pending = (_add_prefix(call, context) for call in outcome.pending)
            raise ApprovalRequired(tuple(pending), outcome.state if context.ledger is None else None)
        if outcome.error is not None and outcome.error.code == MissingTool.default_code:
            raise MissingTool(outcome.error.message, param="tools")
        if outcome.kind == "final":
            result = await self._make_result(outcome)
        else:
            reason = outcome.error.message if outcome.error is not None else outcome.text or "it gave no answer."
            interrupted = _describe_interrupted(context)
            result = make_error_result(f"The agent ended with {outcome.kind}: {reason}{interrupted}")
        spent, tool_calls = context.budget.find_spent(context.call_id)
        return msgspec.structs.replace(result, spent=spent or None, tool_calls=tool_calls or 0)

    async def _make_result(self, outcome: Outcome[Any]) -> ToolResult:
        """Return the result of a call. An exception of `read_output` is an error for the model: the run has ended."""
        if self._read_output is None:
            return ToolResult(outcome.text)
        try:
            return make_result(await call_callback(self._read_output, outcome))
        except Exception as error:
            logger.warning("the output of a subagent cannot be read", exc_info=error)
            return make_error_result(f"The answer of the agent cannot be read: {type(error).__name__}: {error}")

    async def _run(self, task: str, context: AgentContext, on_event: Callable[[RunEvent], object]) -> Outcome[Any]:
        """Return the outcome of the run of this call. Raise LedgerFailed if its entries are not all stored.

        An error as the result of the call would make the model call the subagent again. Its tools would get new keys,
        and effects that have no entry could happen twice.
        """
        try:
            outcome = await read_outcome(await self._start(task, context), on_event)
            subagent = context.journal.subagents[context.idempotency_key]
            if subagent.failure is not None:
                raise subagent.failure
        except RunTaken:
            raise
        except Exception as error:
            context.journal.failure = error
            reason = error.message if isinstance(error, AntiphonError) else f"{type(error).__name__}: {error}"
            raise LedgerFailed(reason) from error
        return outcome

    async def _start(self, task: str, context: AgentContext) -> RunEvents:
        """Start the run of this call, or resume it if an earlier attempt has started it."""
        run_id, ledger, deps = context.idempotency_key, context.ledger, context.deps
        started = await _find_run(run_id, context)
        unresolved = find_inherited(context.journal.state, context.call_id)
        state = context.journal.state
        repeated = None if started is None else state.find_inherited(state.find_call(context.call_id))
        parent = ParentRun(context.journal, context.budget, context.call_id, unresolved, repeated=repeated)
        if started is None:
            return self.agent.run_subagent(
                task, deps=deps, ledger=ledger, run_id=run_id, parent=parent, limits=self._limits
            )
        run: str | bytes = started.pack() if ledger is None else run_id
        verdicts = _find_verdicts(started, context)
        return self.agent.resume_subagent(run, verdicts, deps=deps, ledger=ledger, parent=parent)


def make_subagent_tool(
    invoke: SubagentTool,
    name: str,
    description: str,
    *,
    needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False,
    timeout: float | None = None,
) -> Tool:
    """Return the tool that runs an agent on one input."""
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {"input": {"type": "string", "description": "What to work on, with all it needs."}},
            "required": ["input"],
            "additionalProperties": False,
        },
        invoke=invoke,
        timeout=timeout,
        needs_approval=needs_approval,
        # The run of the subagent has its own journal, so it can be resumed.
        on_interrupt="retry",
    )


async def _find_run(run_id: str, context: AgentContext) -> Journal | None:
    """Return the run of an earlier attempt at this call, if there was one."""
    if context.ledger is not None:
        return await load(run_id, context.ledger) if await context.ledger.read(run_id) else None
    running = context.journal.subagents.get(run_id)
    if running is not None:
        # An attempt before this one has reached the time limit of the tool.
        return running
    run = context.journal.state
    state = run.find_subagent_state(run.find_call(context.call_id))
    return unpack(state) if state else None


def _find_verdicts(started: Journal, context: AgentContext) -> list[Verdict]:
    """Return the verdicts in the parent run on calls of the subagent that it has not received yet."""
    prefix = f"{context.call_id}/"
    own = [
        msgspec.structs.replace(verdict, call_id=call_id.removeprefix(prefix))
        for call_id, verdict in context.journal.state.verdicts.items()
        if call_id.startswith(prefix)
    ]
    state = started.state
    return [each for each in own if state.awaits_verdict(each.call_id) and not state.has_received(each)]


def _describe_interrupted(context: AgentContext) -> str:
    """Return a sentence on the calls of a subagent that were running when it ended; "" if there are none."""
    state = context.journal.subagents[context.idempotency_key].state
    calls = [f"{call.name}({call.arguments})" for call in state.open_calls if call.call_id in state.started_calls]
    if not calls:
        return ""
    return f" These calls were running, and whether they have had an effect is not known: {', '.join(calls)}"


def _add_prefix(call: PendingToolCall, context: ToolContext[Any]) -> PendingToolCall:
    """Return a call of the subagent with the id that it has in the parent run."""
    return msgspec.structs.replace(call, call_id=f"{context.call_id}/{call.call_id}")
