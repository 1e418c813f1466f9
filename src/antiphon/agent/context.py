"""The contexts of a run: for its tools, its hooks, and its dynamic instructions and tools."""

from collections.abc import Callable
from typing import Any

from antiphon.agent.budget import Budget
from antiphon.agent.journal import Journal
from antiphon.agent.subagents import AgentContext
from antiphon.ledger import Ledger
from antiphon.tools.base import RunContext


class Contexts:
    """Makes the contexts of one run."""

    def __init__(self, journal: Journal, budget: Budget, *, deps: Any, ledger: Ledger | None) -> None:
        self._journal = journal
        self._budget = budget
        self._deps = deps
        self._ledger = ledger

    def for_run(self) -> RunContext[Any]:
        return self._make(self._journal.state.turns)

    def for_next_turn(self) -> RunContext[Any]:
        return self._make(self._journal.state.turns + 1)

    def for_call(
        self,
        *,
        run_id: str,
        call_id: str,
        idempotency_key: str,
        report: Callable[[str], None],
        emit: Callable[[Any], None],
    ) -> AgentContext:
        state = self._journal.state
        return AgentContext(
            run_id=run_id,
            call_id=call_id,
            idempotency_key=idempotency_key,
            report=report,
            emit=emit,
            deps=self._deps,
            agent=state.active_agent,
            turn=state.turns,
            usage=self._budget.usage,
            history=state.history,
            journal=self._journal,
            budget=self._budget,
            ledger=self._ledger,
        )

    def _make(self, turn: int) -> RunContext[Any]:
        state = self._journal.state
        return RunContext(
            run_id=self._journal.run_id,
            deps=self._deps,
            agent=state.active_agent,
            turn=turn,
            usage=self._budget.usage,
            history=state.history,
        )
