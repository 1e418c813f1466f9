"""Limits and prices of a run. `budget.py` checks tokens and cost, `steps.py` the others."""

import math

from msgspec import Struct

from antiphon.config.limits import ModelPrice
from antiphon.errors import ConfigError
from antiphon.protocol.response import Usage


class Limits(Struct, frozen=True, kw_only=True):
    """Upper limits of a run; None is no limit. `seconds` excludes the time in which the run waits to be resumed.

    With `wrap_up`, the model gets one more turn without tools to give its answer when a limit other than the time is
    reached. This turn and its usage come on top of `turns`, `tokens` and `cost`. `tool_calls`, `tokens` and `cost`
    include those of subagents.
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
            if value is None:
                continue
            if not _is_number(value):
                raise ConfigError(f"The limit '{name}' must be a number or None, not {type(value).__name__}.")
            if isinstance(value, float) and name not in ("cost", "seconds"):
                raise ConfigError(f"The limit '{name}' must be an integer or None, not {value!r}.")
            if not value >= least:  # also for NaN
                raise ConfigError(f"The limit '{name}' must be at least {least}.")


class Prices(Struct, frozen=True, kw_only=True):
    """Prices of a million tokens. `cached` is the price of cached input tokens if it differs from `input`.

    `currency` is for people. Amounts are not converted.
    """

    input: float
    output: float
    cached: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            is_missing = value is None and name == "cached"
            if not is_missing and (not _is_number(value) or not 0 <= value < math.inf):
                raise ConfigError(f"prices: '{name}' must be a number, at least 0, not {value!r}.")

    def compute_cost(self, usage: Usage) -> float:
        price = ModelPrice(input=self.input, output=self.output, cached_input=self.cached)
        return price.compute_cost(usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
