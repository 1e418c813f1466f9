"""The agent: a model with instructions, tools and limits. Its methods run and resume it."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, Unpack, get_args

from antiphon.agent.approvals import make_verdicts
from antiphon.agent.arguments import (
    CommonOptions,
    Input,
    ResumeOptions,
    StartOptions,
    check_agent_types,
    check_cancel,
    check_deps,
    check_functions,
    check_hooks,
    check_instructions,
    check_run,
    check_run_id,
    check_settings,
    check_text,
    check_types,
    make_run_id,
    read_history,
    read_task,
    rename_durable,
    require_json,
    warn_deprecated,
)
from antiphon.agent.budget import ParentRun
from antiphon.agent.definition import ConversationState, Definition, split_tools
from antiphon.agent.entries import Overrides, Verdict
from antiphon.agent.guardrails import CallGuardrail, Guardrails, InputGuardrail, OutputGuardrail, ResultGuardrail
from antiphon.agent.handoffs import Handoff, InputFilter, collect_agents, read_handoffs
from antiphon.agent.history import ModelSupport
from antiphon.agent.limits import Limits, Prices
from antiphon.agent.outcome import Outcome, RunEvent
from antiphon.agent.run_stream import RunStream, read_outcome, run_in_new_loop
from antiphon.agent.runner import RunArguments, Runner
from antiphon.agent.subagents import SubagentTool, make_subagent_tool
from antiphon.agent.task import Task
from antiphon.agent.transports.base import Transport
from antiphon.agent.typed_output import OutputMode, make_output
from antiphon.errors import ConfigError, InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import RunContext, Tool
from antiphon.tools.executor import STOP_SECONDS, Executor
from antiphon.tools.toolset import Member, ToolSource, check_members

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    DepsT_contra = TypeVar("DepsT_contra", contravariant=True, default=None)
    OutputT_co = TypeVar("OutputT_co", covariant=True, default=str)
else:
    from typing import TypeVar

    DepsT_contra = TypeVar("DepsT_contra", contravariant=True)
    OutputT_co = TypeVar("OutputT_co", covariant=True)

Hook: TypeAlias = Callable[[RunEvent], object] | Callable[[RunEvent, RunContext[DepsT_contra]], object]
Instructions: TypeAlias = str | Callable[[RunContext[DepsT_contra]], str | Awaitable[str | None] | None]
Tools: TypeAlias = (
    Sequence[Member] | ToolSource | Callable[[RunContext[DepsT_contra]], Sequence[Member] | Awaitable[Sequence[Member]]]
)


class Agent(Generic[DepsT_contra, OutputT_co]):
    """A model with instructions, tools and limits.

    `base_url` is the address of a Responses API server; a `transport` is used instead of one. `instructions` and
    `tools` can be functions of the run's context, synchronous or asynchronous, that are called before every turn. A
    list of tools can contain tools that the server runs, such as `FileSearch`, and sets of tools: a `Toolset` or an
    `McpServer`. `deps_type` is the type of the `deps` that a run gets, `output_type` the type of the final answer.
    `output_mode` is the way in which the model gives it: in the format of a schema ("native"), by calling a tool
    ("tool"), or as the instructions describe ("prompt"). With `conversation_state="client"` every request has the whole
    conversation; with "server" it continues the response before, as long as the server supports that. `settings` are
    further parameters of every request. `hooks` are called with every event of every run, and with the context of the
    run if they take two arguments. `output_retries` is the number of further answers after an invalid one.
    `history_filter` selects the items of each request; the history of the run does not change. `handoffs` are the
    agents to which the model can hand a run over. Guardrails check the input, the output, the tool calls and their
    results.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        transport: Transport | None = None,
        name: str = "agent",
        instructions: Instructions[DepsT_contra] | None = None,
        tools: Tools[DepsT_contra] = (),
        deps_type: type[DepsT_contra] | None = None,
        output_type: type[OutputT_co] | None = None,
        output_mode: OutputMode = "native",
        limits: Limits | None = None,
        prices: Prices | None = None,
        conversation_state: ConversationState = "client",
        settings: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook[DepsT_contra]] | None = None,
        turn_retries: int = 2,
        output_retries: int = 1,
        history_filter: InputFilter | None = None,
        handoffs: "Sequence[Agent[Any, Any] | Handoff]" = (),
        input_guardrails: Sequence[InputGuardrail] = (),
        output_guardrails: Sequence[OutputGuardrail] = (),
        call_guardrails: Sequence[CallGuardrail] = (),
        result_guardrails: Sequence[ResultGuardrail] = (),
        state: ConversationState | None = None,
    ) -> None:
        name, model = check_text(name, "name"), check_text(model, "model")
        instructions = check_instructions(instructions)
        self.name, self.prices = name, prices
        self._deps_type = deps_type
        if state is not None:
            warn_deprecated("state", "conversation_state")
        mode = state or conversation_state
        if mode not in get_args(ConversationState):
            raise ConfigError(f"conversation_state: {mode!r} is not one of client, server.")
        if history_filter is not None and mode == "server":
            raise ConfigError("history_filter: with conversation_state='server' the server has the history.")
        check_agent_types(limits, prices)
        check_functions(history_filter=history_filter)
        check_settings(settings, mode)
        if transport is not None and not (base_url is None and api_key is None):
            raise ConfigError("transport: it has its own address and key. Do not pass base_url or api_key.")
        output = make_output(output_type, output_mode, where=f"{name}.output_type")
        task = Task(
            limits=limits or Limits(),
            prices=prices,
            output=output,
            turn_retries=turn_retries,
            output_retries=output_retries,
        )
        request: JsonObject = {"model": model, **(settings or {})}
        if isinstance(instructions, str):
            request["instructions"] = instructions
        if output is not None and output.format is not None:
            request["text"] = {**request.get("text", {}), "format": output.format}
        fixed, hosted, load_tools = split_tools(tools)
        if hosted:
            request["tools"] = [*request.get("tools", ()), *hosted]
        self._definition = Definition(
            name=name,
            transport=transport or self._connect(base_url, api_key),
            settings=request,
            task=task,
            tools=fixed,
            executor=Executor(fixed),
            make_instructions=instructions if callable(instructions) else None,
            load_tools=load_tools,
            guardrails=Guardrails(
                input=input_guardrails, output=output_guardrails, calls=call_guardrails, results=result_guardrails
            ),
            hooks=check_hooks(hooks or ()),
            history_filter=history_filter,
            conversation_state=mode,
            support=ModelSupport(),
            endpoint=(transport or base_url, model),
        ).add_handoffs(read_handoffs(handoffs))

    if not TYPE_CHECKING:

        def __class_getitem__(cls, arguments: Any) -> Any:
            # Type variables have no defaults at runtime before Python 3.13.
            given = arguments if isinstance(arguments, tuple) else (arguments,)
            return super().__class_getitem__(given + (None, str)[len(given) :])

    def _connect(self, base_url: str | None, api_key: str | None) -> Transport:
        if base_url is None:
            raise ConfigError("An agent requires a base_url or a transport.")
        # The HTTP client takes longer to import than everything else here.
        from antiphon.agent.transports.http import HttpTransport

        return HttpTransport(base_url, api_key=api_key)

    @property
    def handoffs(self) -> Sequence[Handoff]:
        """The handoffs to other agents."""
        return self._definition.handoffs

    def add_handoffs(self, *handoffs: "Agent[Any, Any] | Handoff") -> None:
        """Add handoffs to other agents: for agents that hand the run to each other."""
        self._definition = self._definition.add_handoffs(read_handoffs(handoffs))

    async def close(self) -> None:
        """Close the connections, including those of subagents and handoffs. The next run opens new ones."""
        agents: list[Agent[Any, Any]] = [self]
        # The list grows while it is read. Agents may refer to each other.
        for agent in agents:
            await agent._definition.transport.close()
            agents += [each for each in agent._list_references() if each not in agents]

    def _list_references(self) -> "list[Agent[Any, Any]]":
        """Return the agents of the handoffs and of the tools, each once."""
        subagents = (each.invoke.agent for each in self._definition.tools if isinstance(each.invoke, SubagentTool))
        found: Any = dict.fromkeys([*(handoff.agent for handoff in self.handoffs), *subagents])
        return list(found)

    async def run(
        self,
        task: Input,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]  # an agent without deps has the type None for them
        **options: Unpack[StartOptions],
    ) -> Outcome[OutputT_co]:
        """Run the agent on a task and return the outcome. `StartOptions` describes the options."""
        return await read_outcome(self.run_stream(task, deps=deps, **rename_durable(options, StartOptions)))

    def run_sync(
        self,
        task: Input,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]
        **options: Unpack[StartOptions],
    ) -> Outcome[OutputT_co]:
        """Run the agent on a task from synchronous code. Closes the agent when it returns."""
        run = functools.partial(self.run, task, deps=deps, **rename_durable(options, StartOptions))
        return run_in_new_loop(run, self.close)

    def run_stream(
        self,
        task: Input,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]
        raw_events: bool = False,
        partial_output: bool = False,
        **options: Unpack[StartOptions],
    ) -> RunStream[OutputT_co]:
        """Run the agent on a task and yield events. `StartOptions` describes the further options.

        `deps` is passed to tools, dynamic instructions and hooks. Closing the stream, or cancelling its reader, cancels
        the run. With `raw_events` the stream also has every event of the server, as a ModelEvent; with `partial_output`
        it has the typed output while the model writes it, as PartialOutput.
        """
        given = rename_durable(options, StartOptions)
        arguments = self._check_arguments(deps, given, raw_events=raw_events, partial_output=partial_output)
        history = read_history(given.get("history") or ())
        if arguments.session is not None and history:
            raise InvalidRequest("Pass either a session or a history, not both.", param="history")
        run_id = check_run_id(given.get("run_id") or make_run_id(), arguments.ledger)
        return self._make_runner().start([*history, *read_task(task)], run_id, arguments)

    def run_subagent(
        self,
        task: str,
        *,
        deps: Any,
        ledger: Ledger | None,
        run_id: str,
        parent: ParentRun,
        limits: Limits | None = None,
    ) -> RunStream[OutputT_co]:
        """Run the agent for a call of another run."""
        arguments = RunArguments(deps=deps, ledger=ledger, parent=parent, overrides=Overrides(limits=limits))
        return self._make_runner().start(read_task(task), run_id, arguments)

    async def resume(
        self,
        run: str | bytes,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]
        **options: Unpack[ResumeOptions],
    ) -> Outcome[OutputT_co]:
        """Resume a run by its id in the ledger, or by the `state` of its outcome. `ResumeOptions` has the options.

        Raises RunTaken if another process executes the run, unless `force` is set.
        """
        return await read_outcome(self.resume_stream(run, deps=deps, **rename_durable(options, ResumeOptions)))

    def resume_sync(
        self,
        run: str | bytes,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]
        **options: Unpack[ResumeOptions],
    ) -> Outcome[OutputT_co]:
        """Resume a run from synchronous code. Closes the agent when it returns."""
        resume = functools.partial(self.resume, run, deps=deps, **rename_durable(options, ResumeOptions))
        return run_in_new_loop(resume, self.close)

    def resume_stream(
        self,
        run: str | bytes,
        *,
        deps: DepsT_contra = None,  # type: ignore[assignment]
        raw_events: bool = False,
        partial_output: bool = False,
        **options: Unpack[ResumeOptions],
    ) -> RunStream[OutputT_co]:
        """Resume a run and yield events. `ResumeOptions` describes the further options, `run_stream` the others.

        Pass the `deps` of the run again. A finished run yields its outcome again and does nothing. Raises RunTaken if
        another process executes the run, unless `force` is set. Also raises RunTaken if this process loses the run in
        the same way.
        """
        given = rename_durable(options, ResumeOptions)
        check_run(run)
        arguments = self._check_arguments(deps, given, raw_events=raw_events, partial_output=partial_output)
        verdicts = make_verdicts(given.get("approvals"))
        return self._make_runner().resume(run, verdicts, arguments, force=given.get("force", False))

    def resume_subagent(
        self, run: str | bytes, verdicts: Sequence[Verdict], *, deps: Any, ledger: Ledger | None, parent: ParentRun
    ) -> RunStream[OutputT_co]:
        """Resume a run that a call of another run has started. It belongs to the owner of that run."""
        return self._make_runner().resume(run, verdicts, RunArguments(deps=deps, ledger=ledger, parent=parent))

    @property
    def stop_seconds(self) -> float:
        """The longest time that a cancelled run waits for its tools to stop."""
        return self.find_stop_seconds({})

    def find_stop_seconds(self, found: dict[object, float]) -> float:
        """Return the `stop_seconds`. `found` has those of the agents that were seen before, and gets new ones.

        Each agent is computed once: there may be many paths to it. Runs of an agent within its own runs do not count.
        """
        if self in found:
            return found[self]
        found[self] = 0.0
        executors = [definition.executor for definition in self._collect_definitions().values()]
        invokes = [each.invoke for executor in executors for each in executor.tools.values()]
        seconds = [
            each.find_stop_seconds(found)
            if isinstance(each, SubagentTool)
            else getattr(each, "stop_seconds", STOP_SECONDS)
            for each in invokes
        ]
        found[self] = max(seconds, default=0.0)
        return found[self]

    def as_tool(
        self,
        name: str,
        description: str,
        *,
        needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False,
        timeout: float | None = None,
        limits: Limits | None = None,
        read_output: Callable[[Outcome[OutputT_co]], Any] | None = None,
    ) -> Tool:
        """Return a tool that runs this agent on one input and returns its answer.

        `needs_approval` and `timeout` are those of `Tool`. `limits` replace those of the agent. `read_output` makes the
        result of the call from the outcome of a `final` run, instead of its text; it may be a coroutine function.
        """
        check_types(None, None, limits)
        check_functions(read_output=read_output)
        self._definition.task.with_limits(limits)  # raises ConfigError if they need prices
        invoke = SubagentTool(self, limits=limits, read_output=read_output)
        return make_subagent_tool(invoke, name, description, needs_approval=needs_approval, timeout=timeout)

    def _check_arguments(
        self, deps: Any, options: CommonOptions, *, raw_events: bool, partial_output: bool
    ) -> RunArguments:
        """Check the arguments of a run. Raises ConfigError or InvalidRequest."""
        ledger, session, limits = options.get("ledger"), options.get("session"), options.get("limits")
        check_types(ledger, session, limits)
        check_cancel(options.get("cancel"))
        check_deps(deps, self._deps_type)
        settings = options.get("settings")
        check_settings(settings, self._definition.conversation_state)
        model = options.get("model")
        if model is not None:
            model = check_text(model, "model")
        overrides = Overrides(model, None if settings is None else dict(settings), limits)
        require_json(overrides, "settings")
        return RunArguments(
            deps=deps,
            session=session,
            tools=check_members(options.get("tools", ())),
            overrides=overrides,
            ledger=ledger,
            cancel=options.get("cancel"),
            raw_events=raw_events,
            partial_output=partial_output,
        )

    def _collect_definitions(self) -> dict[str, Definition]:
        """Return the definitions of this agent and of those that handoffs can reach, by name."""
        agents: dict[str, Agent[Any, Any]] = collect_agents(self)
        return {name: agent._definition for name, agent in agents.items()}

    def _make_runner(self) -> Runner:
        return Runner(self._definition, self._collect_definitions())
