"""How hard the model is to think, and how long its answer may get: here these belong together."""

from typing import Any

import msgspec

from antiphon.backends.anthropic_messages.traits import Traits
from antiphon.protocol.request import CreateRequest

Json = dict[str, Any]

_BUDGETS = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 24_576, "max": 32_768}
_SMALLEST_BUDGET = 1024
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
_SHORTEST_ANSWER = 512


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the body. `effort` is for `output_config`."""

    max_tokens: int
    thinking: Json | None = None
    effort: str | None = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking["type"] in {"adaptive", "enabled"}


def plan(request: CreateRequest, traits: Traits, *, forced: bool, resumable: bool, answer: int | None) -> Plan:
    """The plan for a turn.

    `forced`: the model must call a tool, and some cannot think then. `resumable`: the calls that are being answered
    began with thinking, without which a model with a budget cannot go on. `answer` is the answer's usual length.
    """
    usual = min(answer or traits.answer, traits.longest)
    plain = Plan(max_tokens=request.max_output_tokens or usual)
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort == "none":
        return _stop_thinking(plain, traits)
    if traits.thinking == "none" or not (effort or (request.reasoning is not None and request.reasoning.summary)):
        return plain
    if traits.thinking == "budget":
        return _plan_budget(request, traits, effort or "medium", usual) if resumable and not forced else plain
    level = _NEAREST.get(effort, effort) if effort and effort not in traits.efforts else effort
    # Newer models keep their thinking to themselves unless they are asked for it.
    thinking = {"type": "adaptive", "display": "summarized"} if traits.forced or not forced else None
    return msgspec.structs.replace(plain, thinking=thinking, effort=level)


def _plan_budget(request: CreateRequest, traits: Traits, effort: str, usual: int) -> Plan:
    budget = _BUDGETS[effort]
    longest = request.max_output_tokens or min(usual + budget, traits.longest)
    budget = min(budget, longest - _SHORTEST_ANSWER)
    if budget < _SMALLEST_BUDGET:
        return Plan(max_tokens=longest)
    return Plan(max_tokens=longest, thinking={"type": "enabled", "budget_tokens": budget})


def _stop_thinking(plain: Plan, traits: Traits) -> Plan:
    if traits.off == "omit":
        return plain
    if traits.off == "never":
        return msgspec.structs.replace(plain, effort=traits.efforts[0])
    return msgspec.structs.replace(plain, thinking={"type": traits.off})
