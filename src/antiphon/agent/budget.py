"""What a run may still use up, while others are at work for it."""

from antiphon.agent.limits import Prices
from antiphon.agent.state import State
from antiphon.agent.task import Task


class Budget:
    """What a run has used up: in its own turns, and by the runs that work for it, as soon as they do.

    `share` is what the run that this one works for has lent it: it may use up no more than is left there.
    """

    def __init__(self, state: State, task: Task, *, share: "Share | None" = None) -> None:
        self._state = state
        self._limits = task.limits
        self._prices = task.prices
        self._above = share.budget if share is not None else None
        self._below: dict[tuple[int, str], Budget] = {}
        if share is not None:
            share.budget._lend(share.call_id, self)

    @property
    def cost(self) -> float | None:
        """What has been written down of it, at the prices of this run. None if it has none."""
        return None if self._prices is None else self._price(self._prices)

    def is_used_up(self) -> bool:
        tokens, cost = self._limits.tokens, self._limits.cost
        if tokens is not None and self._count() >= tokens:
            return True
        return cost is not None and self._prices is not None and self._charge(self._prices) >= cost

    def is_used_up_above(self) -> bool:
        """Whether a run that this one works for has nothing left."""
        return self._above is not None and (self._above.is_used_up() or self._above.is_used_up_above())

    def _lend(self, call_id: str, budget: "Budget") -> None:
        self._below = {key: each for key, each in self._below.items() if self._is_open(*key)}
        self._below[self._state.turns, call_id] = budget

    def _at_work(self) -> list["Budget"]:
        """Those whose spending has not been written down here yet."""
        return [each for key, each in self._below.items() if self._is_open(*key)]

    def _is_open(self, turn: int, call_id: str) -> bool:
        # A model may use the id of a call again in a later turn.
        return turn == self._state.turns and any(call.call_id == call_id for call in self._state.open)

    def _count(self) -> int:
        return self._state.usage.total_tokens + sum(each._count() for each in self._at_work())

    def _charge(self, prices: Prices) -> float:
        """What it has cost so far. Whoever has no prices of its own pays those of its asker."""
        return self._price(prices) + sum(each._charge(each._prices or prices) for each in self._at_work())

    def _price(self, prices: Prices) -> float:
        return prices.of(self._state.unpriced) + self._state.charged


class Share:
    """A budget for the run of one call."""

    def __init__(self, budget: Budget, call_id: str) -> None:
        self.budget = budget
        self.call_id = call_id
