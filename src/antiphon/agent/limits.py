"""How far a run may go."""

from msgspec import Struct

from antiphon.errors import ConfigError
from antiphon.protocol.response import Usage


class Limits(Struct, frozen=True, kw_only=True):
    """What a run may use up; None is no limit. `seconds` are those it was at work, not those it waited to be resumed.

    With `wrap_up`, the model gets one turn without tools to answer with what it has, when a limit other than the
    time is reached. It is the last of its `turns`, and comes on top of its `tokens` and `cost`. These two also hold for
    the agents that work for the run, all together.
    """

    turns: int | None = 20
    tool_calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None
    wrap_up: bool = True

    def __post_init__(self) -> None:
        for name, least in (("turns", 1), ("tool_calls", 0), ("tokens", 1), ("cost", 0), ("seconds", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"A limit of {name} cannot be less than {least}.")


class Prices(Struct, frozen=True, kw_only=True):
    """What a million tokens cost."""

    input: float
    output: float
    cached: float | None = None

    def of(self, usage: Usage) -> float:
        cached = usage.input_tokens_details.cached_tokens
        cached_price = self.input if self.cached is None else self.cached
        fresh = usage.input_tokens - cached
        return (fresh * self.input + cached * cached_price + usage.output_tokens * self.output) / 1_000_000
