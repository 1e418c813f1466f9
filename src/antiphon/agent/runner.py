"""Execution of an agent's runs: open the journal, set up the loop, and call the hooks."""

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct, structs

from antiphon.agent.arguments import require_json, takes_context
from antiphon.agent.budget import Budget, ParentRun
from antiphon.agent.context import Contexts
from antiphon.agent.definition import Definition, RunSetup
from antiphon.agent.entries import Overrides, StartEntry, TraceEntry, Verdict
from antiphon.agent.history import complete_joined
from antiphon.agent.journal import Journal
from antiphon.agent.loop import Loop
from antiphon.agent.outcome import AgentChanged, RunEnded, RunEvent, RunEvents
from antiphon.agent.ownership import has_leases, take_ownership
from antiphon.agent.partial_output import add_partial_outputs
from antiphon.agent.participants import Participant
from antiphon.agent.resume import resume_journal
from antiphon.agent.run_state import RunState
from antiphon.agent.run_stream import OutcomeHolder, RunStream
from antiphon.agent.session_runs import SessionRun
from antiphon.agent.task import Task
from antiphon.agent.tracing import find_tracing
from antiphon.agent.typed_output import TypedOutput
from antiphon.callbacks import call_callback
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger, RunTaken
from antiphon.protocol.json_text import JsonObject
from antiphon.session import Session
from antiphon.tools.toolset import Member

if TYPE_CHECKING:
    from antiphon.agent.spans import RunTrace

logger = logging.getLogger(__name__)

Hooks = list[tuple[Callable[..., object], bool]]
"""Hooks, each with True if it takes the context of the run as its second argument."""


class RunArguments(Struct, frozen=True, kw_only=True):
    """The arguments of a run or of its resumption. `parent` is set for the run of a subagent."""

    deps: Any = None
    tools: Sequence[Member] = ()
    overrides: Overrides = Overrides()
    session: Session | None = None
    ledger: Ledger | None = None
    cancel: asyncio.Event | None = None
    raw_events: bool = False
    partial_output: bool = False
    parent: ParentRun | None = None


class Runner:
    """Executes the runs of an agent. `agents` are all agents that handoffs can reach, by name."""

    def __init__(self, definition: Definition, agents: Mapping[str, Definition]) -> None:
        self._definition = definition
        self._agents = agents

    def start(self, items: list[JsonObject], run_id: str, arguments: RunArguments) -> RunStream[Any]:
        """Start a run and return its events."""
        return self._make_stream(functools.partial(self._start_journal, items, run_id, arguments), arguments)

    def resume(
        self, run: str | bytes, verdicts: Sequence[Verdict], arguments: RunArguments, *, force: bool = False
    ) -> RunStream[Any]:
        """Resume a run and return its events. The run of a subagent belongs to the owner of the first run."""
        parent = arguments.parent
        resume = functools.partial(
            resume_journal,
            run,
            verdicts,
            arguments.ledger,
            agent=self._definition.name if parent is None else None,
            force=force,
            ownership=None if parent is None else parent.journal.ownership,
            overrides=arguments.overrides,
            session_id=None if arguments.session is None else arguments.session.session_id,
            check=self._check_active_agent,
        )
        return self._make_stream(resume, arguments)

    def _make_stream(self, open_journal: Callable[[], Awaitable[Journal]], arguments: RunArguments) -> RunStream[Any]:
        holder = OutcomeHolder()
        if arguments.session is None:
            events = self._execute(open_journal, arguments, holder)
        else:
            events = self._execute_in_session(arguments.session, open_journal, arguments, holder)
        if arguments.partial_output:
            events = add_partial_outputs(events, functools.partial(self._find_output, holder))
        return RunStream(events, holder)

    def _find_output(self, holder: OutcomeHolder, name: str | None) -> TypedOutput | None:
        """Return the output type of an agent, or of the active one."""
        active = name or (holder.journal.state.active_agent if holder.journal is not None else "")
        return self._agents.get(active, self._definition).task.output

    async def _start_journal(self, items: list[JsonObject], run_id: str, arguments: RunArguments) -> Journal:
        require_json(items, "task")
        ledger, parent = arguments.ledger, arguments.parent
        ownership = None if parent is None else parent.journal.ownership
        journal = Journal(run_id, ledger=ledger, ownership=ownership)
        start = await self._make_start(items, arguments)
        try:
            await journal.write(start)
        except RunTaken as error:
            if error.run_id != run_id:
                # The first run has another owner.
                raise
            raise InvalidRequest(
                f"A run with id '{run_id}' exists already: resume it.", param="run_id", code="run_exists"
            ) from None
        if ledger is not None and ownership is None and has_leases(ledger):
            journal.ownership = await take_ownership(ledger, run_id)
        return journal

    async def _make_start(self, items: list[JsonObject], arguments: RunArguments) -> StartEntry:
        session, parent = arguments.session, arguments.parent
        earlier = [] if session is None else await session.load()
        completed, earlier_count = complete_joined(earlier, items)
        return StartEntry(
            self._definition.name,
            completed,
            time.time(),
            overrides=UNSET if arguments.overrides.is_empty else arguments.overrides,
            model=arguments.overrides.model or self._definition.settings["model"],
            unresolved=UNSET if parent is None or not parent.unresolved else list(parent.unresolved),
            session_id=UNSET if session is None else session.session_id,
            earlier_count=UNSET if session is None else earlier_count,
        )

    async def _execute_in_session(
        self,
        session: Session,
        open_journal: Callable[[], Awaitable[Journal]],
        arguments: RunArguments,
        holder: OutcomeHolder,
    ) -> RunEvents:
        held = await SessionRun.open(session, arguments.cancel)
        try:
            async with aclosing(self._execute(open_journal, arguments, holder)) as events:
                async for event in events:
                    # A cancelled run without its session ends before its first turn, and has no items to store.
                    if isinstance(event, RunEnded) and held is not None:
                        event.outcome = await held.save(holder, event.outcome)
                        holder.outcome = event.outcome
                    yield event
        finally:
            if held is not None:
                await asyncio.shield(held.close(holder))

    async def _execute(
        self, open_journal: Callable[[], Awaitable[Journal]], arguments: RunArguments, holder: OutcomeHolder
    ) -> RunEvents:
        journal = await open_journal()
        parent_id = None if arguments.parent is None else arguments.parent.journal.run_id
        hooks = _read_hooks(self._definition)
        trace: RunTrace | None = None
        try:
            trace = await self._start_trace(journal, parent_id)
            loop, contexts = self._make_loop(journal, arguments, trace)
            holder.journal, holder.close_history = journal, loop.close_history
            async with aclosing(loop.events()) as events:
                async for event in events:
                    if parent_id is not None:
                        event.parent_id = parent_id
                    if isinstance(event, AgentChanged):
                        hooks = self._find_hooks(event.agent)
                        self._trace_handoff(trace, event.agent)
                    elif isinstance(event, RunEnded):
                        holder.outcome = event.outcome
                    if hooks:
                        await self._call_hooks(hooks, event, contexts)
                    yield event
        finally:
            holder.stop_watcher()
            if trace is not None:
                trace.end(holder.outcome, sys.exc_info()[1])
            if journal.ownership is not None and arguments.parent is None:
                await asyncio.shield(journal.ownership.release())

    async def _start_trace(self, journal: Journal, parent_id: str | None) -> "RunTrace | None":
        """Start the span of the run if traces are on. The journal records it, for a process that resumes the run."""
        tracing = find_tracing()
        if tracing is None:
            return None
        state = journal.state
        trace = tracing.start_run(
            journal.run_id,
            agent=state.agent,
            model=state.overrides.model or self._definition.settings["model"],
            parent_id=parent_id,
            session_id=state.session_id,
            earlier=state.traceparent,
            items=state.history,
        )
        if state.ended is None and trace.traceparent:
            try:
                await journal.write(TraceEntry(trace.traceparent))
            except BaseException as error:
                trace.end(None, error)
                raise
        return trace

    def _trace_handoff(self, trace: "RunTrace | None", agent: str) -> None:
        if trace is not None and agent in self._agents:
            trace.hand_off(agent, self._agents[agent].settings["model"])

    def _make_loop(self, journal: Journal, arguments: RunArguments, trace: "RunTrace | None") -> tuple[Loop, Contexts]:
        parent = arguments.parent
        definition = _trace_requests(self._definition, trace)
        setup = RunSetup(definition, journal.state.overrides, arguments.tools, raw_events=arguments.raw_events)
        budget = Budget(journal.state, setup.task, parent=parent)
        contexts = Contexts(journal, budget, deps=arguments.deps, ledger=arguments.ledger)

        def find_participant(name: str) -> Participant:
            """Return the agent of this name: the first one, or one to which the run was handed over."""
            if name == journal.state.agent:
                return _trace_calls(setup.make_participant(setup.task, contexts.for_next_turn), trace)
            other = RunSetup(_trace_requests(self._agents[name], trace), raw_events=arguments.raw_events)
            task = _join_tasks(other.task, setup.task)
            return _trace_calls(other.make_participant(task, contexts.for_next_turn), trace)

        loop = Loop(
            journal,
            find_participant(journal.state.agent),
            find_participant=find_participant,
            budget=budget,
            make_context=contexts.for_call,
            cancel=arguments.cancel,
            deps=arguments.deps,
        )
        if parent is not None:
            # A later call may repeat a call of a subagent that has ended, and then finds its run.
            journal.subagents = parent.journal.subagents
            journal.subagents[journal.run_id] = journal
        return loop, contexts

    def _check_active_agent(self, state: RunState) -> None:
        """Raise InvalidRequest if this agent cannot resume a run, because it cannot reach the active agent."""
        name = state.active_agent
        if name != state.agent and name not in self._agents:
            raise InvalidRequest(
                f"The run was handed over to the agent '{name}', and no handoff of '{self._definition.name}' leads "
                "there.",
                param="run",
                code="unknown_agent",
            )

    def _find_hooks(self, active: str) -> Hooks:
        """Return the hooks of the first agent and of the active one."""
        hooks, other = _read_hooks(self._definition), self._agents.get(active)
        return hooks if other is None or other is self._definition else hooks + _read_hooks(other)

    async def _call_hooks(self, hooks: Hooks, event: RunEvent, contexts: Contexts) -> None:
        for hook, takes_two in hooks:
            try:
                await call_callback(hook, event, *([contexts.for_run()] if takes_two else []))
            except Exception:
                logger.exception("hook of the agent %s failed", self._definition.name)


def _read_hooks(definition: Definition) -> Hooks:
    return [(hook, takes_context(hook)) for hook in definition.hooks]


def _trace_requests(definition: Definition, trace: "RunTrace | None") -> Definition:
    """Return the agent with a span for each request to its model, if there are traces."""
    if trace is None:
        return definition
    return structs.replace(definition, transport=trace.wrap_transport(definition.transport))


def _trace_calls(participant: Participant, trace: "RunTrace | None") -> Participant:
    """Return the agent with a span for each tool call, if there are traces."""
    if trace is None:
        return participant
    return structs.replace(participant, executor=trace.wrap_executor(participant.executor))


def _join_tasks(task: Task, first: Task) -> Task:
    """Return the task of an agent to which a run was handed over. The limits are those of the first agent."""
    return structs.replace(task, limits=first.limits, prices=task.prices or first.prices)
