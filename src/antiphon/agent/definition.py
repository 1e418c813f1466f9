"""The definition of an agent, and its setup for one run: the model, tools and goal."""

import functools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct, structs

from antiphon.agent.arguments import check_encodable
from antiphon.agent.entries import NO_OVERRIDES, Overrides
from antiphon.agent.guardrails import NO_GUARDRAILS, Guardrails
from antiphon.agent.handoffs import Handoff, InputFilter
from antiphon.agent.history import ModelSupport
from antiphon.agent.model import ResponsesModel
from antiphon.agent.participants import Participant
from antiphon.agent.task import Task
from antiphon.agent.transports.base import Transport
from antiphon.callbacks import call_callback
from antiphon.errors import ConfigError, ServerError
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import RunContext, Tool
from antiphon.tools.executor import Executor
from antiphon.tools.server_tools import ServerTool
from antiphon.tools.toolset import (
    AnyTool,
    Member,
    Toolset,
    ToolSource,
    check_members,
    is_fixed,
    list_fixed,
    list_own,
    load_all,
)

ConversationState = Literal["client", "server"]
"""The side that has the conversation between two turns of a run."""

MakeInstructions: TypeAlias = Callable[[RunContext[Any]], str | Awaitable[str | None] | None]
LoadTools: TypeAlias = Callable[[RunContext[Any]], Awaitable[Sequence[AnyTool]]]


class Definition(Struct, frozen=True, kw_only=True):
    """The definition of an agent, which its runs share.

    `settings` are the parameters of every request. `make_instructions` is set if the instructions are a function of the
    run. `load_tools` is set if the tools depend on the run: it returns all of them, including `tools`. `executor` and
    `descriptions` are those of `tools` and of the handoffs. `support` is shared by all runs. `endpoint` is described in
    `Participant`.
    """

    name: str
    transport: Transport
    settings: JsonObject
    task: Task
    tools: tuple[Tool, ...] = ()
    handoffs: tuple[Handoff, ...] = ()
    descriptions: tuple[JsonObject, ...] = ()
    executor: Executor
    make_instructions: MakeInstructions | None = None
    load_tools: LoadTools | None = None
    guardrails: Guardrails = NO_GUARDRAILS
    hooks: Sequence[Callable[..., object]] = ()
    history_filter: InputFilter | None = None
    conversation_state: ConversationState = "client"
    support: ModelSupport
    endpoint: Hashable = None

    def add_handoffs(self, handoffs: Iterable[Handoff]) -> "Definition":
        """Return a definition with further handoffs.

        Raises ConfigError if two tools have the same name, or if the agents have prices in different currencies.
        """
        added = (*self.handoffs, *handoffs)
        tools = [*self.tools, *(handoff.tool for handoff in added)]
        _check_names(self.task, tools)
        descriptions = tuple(each.describe() for each in tools)
        subagents = [agent for each in self.tools if (agent := getattr(each.invoke, "agent", None)) is not None]
        for other in [*subagents, *(handoff.agent for handoff in added)]:
            _check_currency(self, other)
        return structs.replace(self, handoffs=added, descriptions=descriptions, executor=Executor(tools))


def _check_names(task: Task, tools: Iterable[Tool]) -> None:
    """Raise ConfigError if a tool has the name of an output tool."""
    reserved = {} if task.output is None else task.output.tools
    for each in tools:
        if each.name in reserved:
            raise ConfigError(f"There are two tools called '{each.name}'.")


def _check_currency(definition: Definition, other: Any) -> None:
    """Raise ConfigError if another agent, whose cost is part of the cost of this one, has another currency."""
    own, others = definition.task.prices, getattr(other, "prices", None)
    if own is not None and others is not None and own.currency != others.currency:
        raise ConfigError(
            f"prices: the agent '{definition.name}' has {own.currency}, and '{other.name}' has {others.currency}. "
            "Agents of one run have the same currency."
        )


class RunSetup:
    """The model, the tools and the goal of an agent in one run. `tools` are added to those of the agent."""

    def __init__(
        self,
        definition: Definition,
        overrides: Overrides = NO_OVERRIDES,
        tools: Sequence[Member] = (),
        *,
        raw_events: bool = False,
    ) -> None:
        self._definition = definition
        self._run_members = tools
        self._run_tools = list_fixed(tools)
        self._is_changing = definition.load_tools is not None or not is_fixed(tools)
        self._has_instructions = "instructions" in (overrides.settings or {})
        self.task = definition.task.with_limits(overrides.limits)
        self._executor = definition.executor
        descriptions: Sequence[JsonObject] = definition.descriptions
        if tools or self._is_changing:
            merged = self._merge_tools(definition.tools)
            self._executor = definition.executor.with_tools(list_own(merged))
            descriptions = [each.describe() for each in merged]
        self._model = ResponsesModel(
            definition.transport,
            settings=_merge_settings(definition, overrides),
            tools=descriptions,
            conversation_state=definition.conversation_state,
            support=definition.support,
            output=definition.task.output,
            history_filter=definition.history_filter,
            raw_events=raw_events,
        )

    def make_participant(self, task: Task, make_context: Callable[[], RunContext[Any]]) -> Participant:
        """Return the agent as a participant of a run, with the task that it has there."""
        definition = self._definition
        is_dynamic = definition.make_instructions is not None or self._is_changing
        return Participant(
            name=definition.name,
            model=self._model,
            executor=self._executor,
            task=task,
            guardrails=definition.guardrails,
            handoffs={handoff.tool.name: handoff for handoff in definition.handoffs},
            endpoint=definition.endpoint,
            prepare=functools.partial(self._prepare, make_context) if is_dynamic else None,
        )

    async def _prepare(self, make_context: Callable[[], RunContext[Any]]) -> None:
        """Make the instructions and the tools of the next turn. Raises ServerError if one of the functions fails."""
        definition, context = self._definition, make_context()
        if definition.make_instructions is not None and not self._has_instructions:
            text = await _call(definition.make_instructions, context, "instructions", definition.name)
            if text is not None and not isinstance(text, str):
                raise _make_error("instructions", definition.name, f"they returned {type(text).__name__}, not a string")
            self._model.set_instructions(None if text is None else str.__str__(text))
        if self._is_changing:
            made = await _call(self._load_tools, context, "tools", definition.name)
            try:
                tools = self._merge_tools(made)
                self._executor.replace_tools(list_own(tools))
            except ConfigError as error:
                raise _make_error("tools", definition.name, error.message) from None
            self._model.set_tools([each.describe() for each in tools])

    async def _load_tools(self, context: RunContext[Any]) -> Sequence[AnyTool]:
        """Return the agent's tools of the next turn. Also load those of the run."""
        load = self._definition.load_tools
        tools = self._definition.tools if load is None else await load(context)
        self._run_tools = await load_all(self._run_members, context)
        return tools

    def _merge_tools(self, tools: Iterable[AnyTool]) -> list[AnyTool]:
        """Return all tools. A tool of the run replaces the agent's tool of the same name."""
        replaced = {each.name for each in list_own(self._run_tools)}
        handoffs = (handoff.tool for handoff in self._definition.handoffs)
        others = (each for each in tools if isinstance(each, ServerTool) or each.name not in replaced)
        merged = [*others, *self._run_tools, *handoffs]
        _check_names(self.task, list_own(merged))
        return merged


def split_tools(tools: Any) -> tuple[tuple[Tool, ...], list[JsonObject], LoadTools | None]:
    """Return the tools that the agent runs, the request's entries of those that the server runs, and `load_tools`.

    `load_tools` is None if no tool depends on the run. Otherwise it also returns the tools of the server.
    """
    if isinstance(tools, Tool | ServerTool):
        raise ConfigError("tools: expected a list of tools, got one tool.")
    if isinstance(tools, ToolSource):
        members: tuple[Member, ...] = (tools,)
    else:
        members = (Toolset.dynamic(tools),) if callable(tools) else check_members(tools)
    fixed = list_fixed(each for each in members if is_fixed([each]))
    for each in fixed:
        check_encodable(each.describe(), f"tools.{each.name if isinstance(each, Tool) else each.type}")
    own = tuple(list_own(fixed))
    if not is_fixed(members):
        return own, [], functools.partial(load_all, members)
    return own, [each.describe() for each in fixed if isinstance(each, ServerTool)], None


def _merge_settings(definition: Definition, overrides: Overrides) -> JsonObject:
    """Return the parameters of the requests of a run. The format of the output type stays."""
    if overrides.model is None and not overrides.settings:
        return definition.settings
    settings = definition.settings | (overrides.settings or {})
    if overrides.model is not None:
        settings["model"] = overrides.model
    if definition.task.output is not None and definition.task.output.format is not None:
        settings["text"] = {**(settings.get("text") or {}), "format": definition.settings["text"]["format"]}
    return settings


async def _call(function: Callable[[RunContext[Any]], Any], context: RunContext[Any], part: str, agent: str) -> Any:
    try:
        return await call_callback(function, context)
    except ConfigError as error:
        raise _make_error(part, agent, error.message) from None
    except AssertionError:
        # An assertion of a test must fail the test, not only the run.
        raise
    except Exception as error:
        raise _make_error(part, agent, f"{type(error).__name__}: {error}") from error


def _make_error(part: str, agent: str, reason: str) -> ServerError:
    return ServerError(f"The {part} of the agent '{agent}' cannot be made: {reason}", code=f"{part}_failed")
