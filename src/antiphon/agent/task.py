"""The goal of a run: its limits, the type of its final answer, and the tool call that ends it."""

from msgspec import Struct, structs

from antiphon.agent.limits import Limits, Prices
from antiphon.agent.typed_output import TypedOutput
from antiphon.errors import ConfigError


class Task(Struct, frozen=True, kw_only=True):
    """The goal and the limits of a run.

    `output` parses the final answer. A call of the tool named `decision` ends the run. With `reminder`, a turn of text
    alone does not end the run: the model gets this text and takes another turn. `output_retries` is the number of
    further answers after one that does not match the output type, or that an output guardrail has sent back. Raises
    ConfigError for a limit of cost without prices, and for a number of retries that is not one.
    """

    limits: Limits = Limits()
    prices: Prices | None = None
    output: TypedOutput | None = None
    decision: str | None = None
    reminder: str | None = None
    turn_retries: int = 2
    output_retries: int = 1

    def __post_init__(self) -> None:
        if self.limits.cost is not None and self.prices is None:
            raise ConfigError("The limit 'cost' requires 'prices'.")
        for name in ("turn_retries", "output_retries"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: expected an integer, at least 0, got {value!r}.")

    def with_limits(self, limits: Limits | None) -> "Task":
        """Return the task with these limits instead of its own; None leaves them."""
        return self if limits is None else structs.replace(self, limits=limits)
