"""What a tool is: a name, a schema, and something to call. Python functions and MCP servers both become this."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, get_args

from msgspec import Struct

from antiphon.errors import ConfigError
from antiphon.protocol.response import Usage

OnInterrupt = Literal["ask", "retry", "tell"]
"""What to do with a call that was under way when its process died, so that nobody knows whether it took effect.

`ask`: pause until somebody says. `retry`: call it again with the same idempotency key. `tell`: let the model know.
"""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolContext(Struct, frozen=True, kw_only=True):
    """What a tool may know about its call.

    `idempotency_key` is the same each time this very call is made, however often that must be: what has an effect
    elsewhere hands it on there. `report` tells those who watch the run how far it is, from any thread.
    """

    run_id: str
    call_id: str
    idempotency_key: str
    report: Callable[[str], None] = lambda _: None


class Spending(Struct, frozen=True):
    """What models have taken. `cost` is None if nobody here knows their prices."""

    usage: Usage
    cost: float | None = None


class ToolResult(Struct, frozen=True):
    """What the model reads: a text, or content parts as the API has them. An error is a result too.

    A tool that asks models itself says in `spent` what they took: it counts against the limits of the run.
    """

    output: str | list[dict[str, Any]]
    is_error: bool = False
    spent: Spending | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A tool, ready to be offered and called.

    `parameters` is its JSON Schema, strict if `strict` says so. `invoke` takes the arguments as the model wrote them;
    it may raise, and may be cancelled. `timeout` in seconds for each attempt, `retries` after it has raised or taken
    too long, `concurrency` at once, and `needs_approval` before: always, never, or depending on the arguments. A
    `repeatable` one may be called again and again with the same arguments, as one that asks for the time: others are
    then taken to be in a loop.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    invoke: Callable[[str, ToolContext], Awaitable[ToolResult]]
    strict: bool = True
    timeout: float | None = None
    retries: int = 0
    concurrency: int | None = None
    needs_approval: bool | Callable[[Mapping[str, Any]], bool] = False
    on_interrupt: OnInterrupt = "ask"
    repeatable: bool = False

    def __post_init__(self) -> None:
        require_name(self.name)
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"The timeout of the tool '{self.name}' must be more than 0 seconds.")
        if self.retries < 0:
            raise ConfigError(f"The retries of the tool '{self.name}' cannot be fewer than 0.")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"The concurrency of the tool '{self.name}' must be at least 1.")
        if self.on_interrupt not in get_args(OnInterrupt):
            raise ConfigError(f"The on_interrupt of the tool '{self.name}' is one of: ask, retry, tell.")

    def describe(self) -> dict[str, Any]:
        """The tool as a request offers it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
            "strict": self.strict,
        }


def require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"A tool cannot be called {name!r}: use 1 to 64 letters, digits, '_' and '-'.")


class Call(Struct, frozen=True):
    """A call that a model has made."""

    call_id: str
    name: str
    arguments: str


class Waiting(Exception):
    """Raised by a tool that cannot go on before somebody has approved calls of its own, which are `calls`.

    It is called again once that has happened, and then gets `state` back, if it gave one.
    """

    def __init__(self, calls: tuple[Call, ...], state: bytes | None) -> None:
        super().__init__("waiting for approval")
        self.calls = calls
        self.state = state
