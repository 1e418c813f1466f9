"""Handoffs: a tool call by which the model passes the run to another agent.

The run goes on as that agent: with its instructions, tools, model, guardrails and output type. The limits are those of
the first agent. The journal records the handoff, so that a resumed run goes on in the right agent.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from antiphon.callbacks import call_callback
from antiphon.errors import ConfigError
from antiphon.protocol.json_text import JsonObject
from antiphon.tools.base import OnInterrupt, Tool, ToolContext, ToolResult, make_name
from antiphon.tools.schema import JsonType

_NO_PARAMETERS = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}

SECOND_HANDOFF = "The call was not made: a turn can have one handoff, and it had another one before."

InputFilter = Callable[[list[JsonObject]], Sequence[JsonObject] | Awaitable[Sequence[JsonObject]]]
"""Returns the history that a model reads, from the whole history."""


class HandoffTarget(Protocol):
    """The part of `Agent` that a handoff uses."""

    name: str

    @property
    def handoffs(self) -> "Sequence[Handoff]": ...


class Handoff:
    """A handoff to an agent, with options.

    The model calls a tool: `name`, by default `transfer_to_` and the name of the agent, with `description`.
    `input_type` is the type of its arguments, by default none. `on_handoff` is called with the context of the call,
    and with the arguments if there is an `input_type`. If it fails, the model reads the error and the run stays with
    the present agent. `input_filter` gets the history, including the handoff, and returns the history for the agent.
    `needs_approval` and `on_interrupt` are as for other tools; an interrupted handoff is repeated by default, and then
    calls `on_handoff` with the same idempotency key.
    """

    def __init__(
        self,
        agent: HandoffTarget,
        *,
        name: str | None = None,
        description: str | None = None,
        input_filter: InputFilter | None = None,
        on_handoff: Callable[..., object] | None = None,
        input_type: Any = None,
        needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False,
        on_interrupt: OnInterrupt = "retry",
    ) -> None:
        if not isinstance(getattr(agent, "name", None), str) or not hasattr(agent, "handoffs"):
            raise ConfigError(f"handoffs: expected an agent, got {type(agent).__name__}.")
        if input_type is not None and on_handoff is None:
            raise ConfigError("A handoff with an input_type requires on_handoff, which gets the input.")
        for option, function in (("input_filter", input_filter), ("on_handoff", on_handoff)):
            if function is not None and not callable(function):
                raise ConfigError(f"{option}: expected a function, got {type(function).__name__}.")
        self.agent = agent
        self._input_filter = input_filter
        self._on_handoff = on_handoff
        self._input_type = None if input_type is None else _make_input_type(input_type, agent.name)
        self.tool = Tool(
            name=name or make_name(f"transfer_to_{agent.name}"),
            description=description or f"Hand the conversation over to the agent '{agent.name}', which continues it.",
            parameters=_NO_PARAMETERS if self._input_type is None else self._input_type.schema,
            invoke=self._invoke,
            needs_approval=needs_approval,
            on_interrupt=on_interrupt,
        )

    async def filter_history(self, history: list[JsonObject]) -> list[JsonObject] | None:
        """Return the history for the agent; None if it does not change. Raises the exceptions of the filter."""
        if self._input_filter is None:
            return None
        items = require_items(await call_callback(self._input_filter, history), "input_filter")
        # The history must be equal to that of a resumed run.
        decoded: list[JsonObject] = msgspec.json.decode(msgspec.json.encode(items))
        return decoded

    async def _invoke(self, arguments: str, context: ToolContext) -> ToolResult:
        values = [] if self._input_type is None else [self._input_type.decode(arguments or "{}")]
        if self._on_handoff is not None:
            await self._call_on_handoff(context, *values)
        return ToolResult(f"The conversation was handed over to {self.agent.name}.")

    async def _call_on_handoff(self, *arguments: Any) -> None:
        assert self._on_handoff is not None
        try:
            await call_callback(self._on_handoff, *arguments)
        except msgspec.MsgspecError as error:
            # Raised by the function itself. The executor would report it as an error in the arguments.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def require_items(items: Any, name: str) -> Sequence[JsonObject]:
    """Return the items that a filter of this name has returned. Raises TypeError if they are not items."""
    if not isinstance(items, Sequence) or not all(isinstance(item, dict) for item in items):
        raise TypeError(f"{name} must return a list of items")
    return items


def _make_input_type(input_type: Any, agent: str) -> JsonType:
    json_type = JsonType(input_type, where=f"the input_type of the handoff to '{agent}'", can_loosen=False)
    if json_type.schema.get("type") != "object":
        raise ConfigError(
            f"The input_type of the handoff to '{agent}' must be a type with fields, such as a dataclass."
        )
    return json_type


def read_handoffs(given: Any) -> list[Handoff]:
    """Return handoffs of agents and of handoffs. Raises ConfigError for anything else."""
    if not isinstance(given, Iterable):
        raise ConfigError(f"handoffs: expected a list of agents and handoffs, got {type(given).__name__}.")
    return [each if isinstance(each, Handoff) else Handoff(each) for each in given]


Target = TypeVar("Target", bound=HandoffTarget)


def collect_agents(first: Target) -> dict[str, Target]:
    """Return the agents that handoffs can reach, by name. Raises ConfigError if two of them have the same name."""
    agents: dict[str, Any] = {first.name: first}
    waiting: list[HandoffTarget] = [first]
    while waiting:
        for target in (handoff.agent for handoff in waiting.pop().handoffs):
            if target.name not in agents:
                agents[target.name] = target
                waiting.append(target)
            elif agents[target.name] is not target:
                raise ConfigError(f"Two agents of the handoffs are called '{target.name}': give them different names.")
    return agents


def drop_tool_calls(items: list[JsonObject]) -> list[JsonObject]:
    """Return the messages of a history, without tool calls, their outputs, and reasoning: an `input_filter`."""
    return [item for item in items if item.get("type", "message") == "message"]
