"""The agents of a run, as the loop uses them: the one that started it, and those to which handoffs can pass it."""

from collections.abc import Awaitable, Callable, Hashable, Mapping

from msgspec import Struct, field

from antiphon.agent.guardrails import NO_GUARDRAILS, Guardrails
from antiphon.agent.handoffs import Handoff
from antiphon.agent.model import ModelClient
from antiphon.agent.task import Task
from antiphon.tools.executor import Executor


class Participant(Struct, frozen=True, kw_only=True):
    """An agent in one run.

    `handoffs` are by the name of their tool, which is one of the executor's. `endpoint` is equal for agents that use
    the same model on the same server, which can decrypt the reasoning of each other. `prepare` makes the dynamic
    instructions and tools: it is called before every turn, and before the open calls of a resumed run.
    """

    name: str = ""
    model: ModelClient
    executor: Executor
    task: Task
    guardrails: Guardrails = NO_GUARDRAILS
    handoffs: Mapping[str, Handoff] = field(default_factory=dict)
    endpoint: Hashable = None
    prepare: Callable[[], Awaitable[None]] | None = None


FindParticipant = Callable[[str], Participant]
