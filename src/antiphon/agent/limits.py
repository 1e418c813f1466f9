"""How far a run may go."""

from typing import Annotated

from msgspec import Meta, Struct

from antiphon.protocol.response import Usage


class Limits(Struct, frozen=True, kw_only=True):
    """What a run may use up; None is no limit. `seconds` is measured from its beginning, also when it is resumed.

    With `wrap_up`, the model gets one turn without tools to answer with what it has, when a limit other than the
    time is reached.
    """

    turns: Annotated[int, Meta(ge=1)] | None = 20
    tool_calls: Annotated[int, Meta(ge=0)] | None = None
    tokens: Annotated[int, Meta(ge=1)] | None = None
    cost: float | None = None
    seconds: float | None = None
    wrap_up: bool = True


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
