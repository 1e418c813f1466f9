"""The agent: a model with instructions, tools and limits. Its methods run and resume it."""

import asyncio
import functools
import inspect
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import structs

from antiphon.agent.approvals import Approval, make_verdict
from antiphon.agent.budget import Budget, ParentRun
from antiphon.agent.entries import StartEntry, Verdict
from antiphon.agent.guardrails import (
    CallGuardrail,
    Guardrails,
    InputGuardrail,
    OutputGuardrail,
    ResultGuardrail,
)
from antiphon.agent.handoffs import Handoff, collect_agents, read_handoffs
from antiphon.agent.history import EncryptionSupport, complete_history
from antiphon.agent.journal import Journal, RunState
from antiphon.agent.limits import Limits, Prices
from antiphon.agent.loop import Loop
from antiphon.agent.model import ResponsesModel
from antiphon.agent.outcome import AgentChanged, Outcome, RunEvent, RunEvents, read_outcome
from antiphon.agent.ownership import has_leases, take_ownership
from antiphon.agent.participants import Participant
from antiphon.agent.resume import resume_journal
from antiphon.agent.subagents import AgentContext, SubagentTool
from antiphon.agent.task import Task, TypedOutput
from antiphon.agent.transports.base import Transport
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import Ledger, RunTaken
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import Tool
from antiphon.tools.executor import STOP_SECONDS, Executor

logger = logging.getLogger(__name__)

Input = str | Sequence[JsonObject]


class Agent:
    """A model with instructions, tools and limits.

    `base_url` is the address of a Responses API server; a `transport` is used instead of one. `output_type` is the type
    of the final answer. With `state="client"` every request has the whole conversation; with "server" it continues the
    response before, as long as the server supports that. `settings` are further parameters of every request. `hooks`
    are called with every event of every run. `output_retries` is the number of further answers after an invalid one.
    `handoffs` are the agents to which the model can hand a run over. Guardrails check the input, the output, the tool
    calls and their results.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        transport: Transport | None = None,
        name: str = "agent",
        instructions: str | None = None,
        tools: Sequence[Tool] = (),
        output_type: Any = None,
        limits: Limits | None = None,
        prices: Prices | None = None,
        state: Literal["client", "server"] = "client",
        settings: Mapping[str, Any] | None = None,
        hooks: Sequence[Callable[[RunEvent], object]] = (),
        turn_retries: int = 2,
        output_retries: int = 1,
        handoffs: "Sequence[Agent | Handoff]" = (),
        input_guardrails: Sequence[InputGuardrail] = (),
        output_guardrails: Sequence[OutputGuardrail] = (),
        call_guardrails: Sequence[CallGuardrail] = (),
        result_guardrails: Sequence[ResultGuardrail] = (),
    ) -> None:
        self.name = name
        self._tools = [_require_tool(each) for each in tools]
        self._handoffs: list[Handoff] = []
        self._endpoint = (transport or base_url, model)
        self._guardrails = Guardrails(
            input=input_guardrails, output=output_guardrails, calls=call_guardrails, results=result_guardrails
        )
        self.add_handoffs(*handoffs)
        output = None if output_type is None else TypedOutput(output_type, where=f"{name}.output_type")
        self._task = Task(
            limits=limits or Limits(),
            prices=prices,
            output=output,
            turn_retries=turn_retries,
            output_retries=output_retries,
        )
        if self._task.limits.cost is not None and prices is None:
            raise ConfigError("The limit 'cost' requires 'prices'.")
        if state not in ("client", "server"):
            raise ConfigError(f"state: {state!r} is not one of client, server.")
        self._settings = {"model": model, **(settings or {})}
        if instructions is not None:
            self._settings["instructions"] = instructions
        if output is not None:
            self._settings["text"] = {**self._settings.get("text", {}), "format": output.format}
        self._state = state
        self._encryption = EncryptionSupport()
        self._hooks = hooks
        self._transport = transport or self._connect(base_url, api_key)

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        if base_url is None:
            raise ConfigError("An agent requires a base_url or a transport.")
        # The HTTP client takes longer to import than everything else here.
        from antiphon.agent.transports.http import HttpTransport

        return HttpTransport(base_url, api_key=api_key)

    @property
    def handoffs(self) -> Sequence[Handoff]:
        """The handoffs to other agents."""
        return self._handoffs

    def add_handoffs(self, *handoffs: "Agent | Handoff") -> None:
        """Add handoffs to other agents: for agents that hand the run to each other."""
        self._handoffs += read_handoffs(handoffs)
        tools = [*self._tools, *(handoff.tool for handoff in self._handoffs)]
        self._descriptions = [each.describe() for each in tools]
        self._executor = Executor(tools)

    async def close(self) -> None:
        """Close the connections, including those of subagents and handoffs. The next run opens new ones."""
        for agent in collect_agents(self).values():
            await agent._transport.close()
            for each in agent._tools:
                if isinstance(each.invoke, SubagentTool):
                    await each.invoke.agent.close()

    async def run(
        self,
        task: Input,
        *,
        history: Sequence[JsonObject] = (),
        durable: Ledger | None = None,
        run_id: str | None = None,
        cancel: asyncio.Event | None = None,
    ) -> Outcome:
        """Run the agent on a task and return the outcome."""
        events = self.run_stream(task, history=history, durable=durable, run_id=run_id, cancel=cancel)
        return await read_outcome(events)

    def run_sync(self, task: Input, **options: Any) -> Outcome:
        """Run the agent on a task from synchronous code. Closes the agent when it returns."""
        return self._run_in_new_loop(functools.partial(self.run, task, **options))

    def run_stream(
        self,
        task: Input,
        *,
        history: Sequence[JsonObject] = (),
        durable: Ledger | None = None,
        run_id: str | None = None,
        cancel: asyncio.Event | None = None,
        parent: ParentRun | None = None,
    ) -> RunEvents:
        """Run the agent on a task and yield events. With a ledger in `durable`, another process can resume the run.

        Closing the stream, or cancelling its reader, cancels the run. Setting `cancel` does too, and yields an outcome.
        `parent` is set for the run of a subagent.
        """
        items = [*history, *_read_task(task)]
        new_id = run_id or f"run_{int(time.time() * 1000):x}{secrets.token_hex(8)}"
        start = functools.partial(self._start_journal, items, new_id, durable, parent)
        return self._execute(start, durable, cancel, parent)

    async def resume(
        self,
        run: str | bytes,
        *,
        approvals: Mapping[str, Approval] | None = None,
        durable: Ledger | None = None,
        force: bool = False,
        cancel: asyncio.Event | None = None,
    ) -> Outcome:
        """Resume a run by its id in the ledger, or by the `state` of its outcome.

        Raises RunTaken if another process executes the run, unless `force` is set.
        """
        events = self.resume_stream(run, approvals=approvals, durable=durable, force=force, cancel=cancel)
        return await read_outcome(events)

    def resume_sync(self, run: str | bytes, **options: Any) -> Outcome:
        """Resume a run from synchronous code. Closes the agent when it returns."""
        return self._run_in_new_loop(functools.partial(self.resume, run, **options))

    def resume_stream(
        self,
        run: str | bytes,
        *,
        approvals: Mapping[str, Approval] | None = None,
        durable: Ledger | None = None,
        force: bool = False,
        cancel: asyncio.Event | None = None,
    ) -> RunEvents:
        """Resume a run and yield events. `approvals` are the verdicts on its pending calls, by call id.

        A finished run yields its outcome again and does nothing. Raises RunTaken if another process executes the run,
        unless `force` is set: then that process stops before its next tool call. Also raises RunTaken if this process
        loses the run in the same way.
        """
        verdicts = [make_verdict(call_id, approval) for call_id, approval in (approvals or {}).items()]
        resume = functools.partial(
            resume_journal, run, verdicts, durable, agent=self.name, force=force, check=self._check_active_agent
        )
        return self._execute(resume, durable, cancel, None)

    def resume_subagent(
        self, run: str | bytes, verdicts: Sequence[Verdict], *, durable: Ledger | None, parent: ParentRun
    ) -> RunEvents:
        """Resume a run that a call of another run has started. It belongs to the owner of that run."""
        resume = functools.partial(
            resume_journal,
            run,
            verdicts,
            durable,
            ownership=parent.journal.ownership,
            check=self._check_active_agent,
        )
        return self._execute(resume, durable, None, parent)

    @property
    def stop_seconds(self) -> float:
        """The longest time that a cancelled run waits for its tools to stop."""
        tools = [tool for agent in collect_agents(self).values() for tool in agent._executor.tools.values()]
        return max((getattr(each.invoke, "stop_seconds", STOP_SECONDS) for each in tools), default=0.0)

    def as_tool(self, name: str, description: str) -> Tool:
        """Return a tool that runs this agent on one input, within its own limits, and returns its answer."""
        return Tool(
            name=name,
            description=description,
            parameters={
                "type": "object",
                "properties": {"input": {"type": "string", "description": "What to work on, with all it needs."}},
                "required": ["input"],
                "additionalProperties": False,
            },
            invoke=SubagentTool(self),
            # The run of the subagent has its own journal, so it can be resumed.
            on_interrupt="retry",
        )

    async def _start_journal(
        self, items: list[JsonObject], run_id: str, ledger: Ledger | None, parent: ParentRun | None
    ) -> Journal:
        _require_json(items)
        ownership = None if parent is None else parent.journal.ownership
        journal = Journal(run_id, ledger=ledger, ownership=ownership)
        try:
            await journal.write(StartEntry(self.name, complete_history(items), time.time()))
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

    async def _execute(
        self,
        open_journal: Callable[[], Awaitable[Journal]],
        ledger: Ledger | None,
        cancel: asyncio.Event | None,
        parent: ParentRun | None,
    ) -> RunEvents:
        if ledger is not None and not hasattr(ledger, "append"):
            raise ConfigError(f"durable: expected a ledger such as SqliteLedger(path), got {type(ledger).__name__}.")
        agents = collect_agents(self)
        journal = await open_journal()
        find_participant = functools.partial(self._find_participant, journal.state, agents)
        budget = Budget(journal.state, self._task, parent=parent)
        context = functools.partial(AgentContext, journal=journal, ledger=ledger, budget=budget)
        loop = Loop(
            journal,
            self._make_participant(self._task),
            find_participant=find_participant,
            budget=budget,
            make_context=context,
            cancel=cancel,
        )
        if parent is not None:
            parent.journal.subagents[parent.call_id] = journal
        parent_id = None if parent is None else parent.journal.run_id
        hooks = self._hooks
        try:
            async with aclosing(loop.events()) as events:
                async for event in events:
                    if parent_id is not None:
                        event.parent_id = parent_id
                    if isinstance(event, AgentChanged):
                        hooks = [*self._hooks, *self._find_hooks(agents.get(event.agent))]
                    if hooks:
                        await self._call_hooks(hooks, event)
                    yield event
        finally:
            if journal.ownership is not None and parent is None:
                await asyncio.shield(journal.ownership.release())

    def _make_participant(self, first: Task) -> Participant:
        """Return this agent as a participant of a run whose first agent has the task `first`."""
        model = ResponsesModel(
            self._transport,
            settings=self._settings,
            tools=self._descriptions,
            state=self._state,
            encryption=self._encryption,
        )
        task = structs.replace(self._task, limits=first.limits, prices=self._task.prices or first.prices)
        return Participant(
            name=self.name,
            model=model,
            executor=self._executor,
            task=task,
            guardrails=self._guardrails,
            handoffs={handoff.tool.name: handoff for handoff in self._handoffs},
            endpoint=self._endpoint,
        )

    def _find_participant(self, state: RunState, agents: "Mapping[str, Agent]", name: str) -> Participant:
        """Return the agent to which a run of this agent was handed over, or this agent."""
        agent = self if name == state.agent else agents[name]
        return agent._make_participant(self._task)

    def _check_active_agent(self, state: RunState) -> None:
        """Raise InvalidRequest if this agent cannot resume a run, because it cannot reach the active agent."""
        name = state.active_agent
        if name != state.agent and name not in collect_agents(self):
            raise InvalidRequest(
                f"The run was handed over to the agent '{name}', and no handoff of '{self.name}' leads there.",
                param="run",
                code="unknown_agent",
            )

    def _find_hooks(self, active: "Agent | None") -> Sequence[Callable[[RunEvent], object]]:
        return () if active is None or active is self else active._hooks

    async def _call_hooks(self, hooks: Sequence[Callable[[RunEvent], object]], event: RunEvent) -> None:
        for hook in hooks:
            try:
                result = hook(event)
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logger.exception("hook of the agent %s failed", self.name)

    def _run_in_new_loop(self, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._run_and_close(work))
        raise RuntimeError("An event loop is running in this thread: await the run instead.")

    async def _run_and_close(self, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Close the agent after the run: its connections belong to the event loop, which ends too."""
        try:
            return await work()
        finally:
            await self.close()


def _read_task(task: Any) -> list[JsonObject]:
    if isinstance(task, str):
        return [{"role": "user", "content": task}]
    if not isinstance(task, Sequence) or not all(isinstance(item, dict) for item in task):
        raise InvalidRequest("A task must be a string or a list of items.", param="task")
    return list(task)


def _require_json(items: list[JsonObject]) -> None:
    try:
        msgspec.json.encode(items)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The task cannot be encoded as JSON: {error}.", param="task") from None


def _require_tool(tool: Tool) -> Tool:
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        raise ConfigError(f"{name} is not a tool: decorate it with @tool.")
    return tool
