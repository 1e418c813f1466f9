"""What a run is after."""

from typing import Any, Protocol

from msgspec import Struct

from antiphon.agent.limits import Limits, Prices


class Output(Protocol):
    def read(self, text: str) -> Any:
        """The final answer that a text stands for. Raises msgspec.ValidationError or msgspec.DecodeError."""


class Task(Struct, frozen=True, kw_only=True):
    """What a run is after, and how far it may go.

    `output` is the form of the final answer. A call of the tool named `decision` is the run's end. After a turn of text
    alone that is no end, the model is told to go on with `nudge`.
    """

    limits: Limits = Limits()
    prices: Prices | None = None
    output: Output | None = None
    decision: str | None = None
    nudge: str | None = None
    turn_retries: int = 2
