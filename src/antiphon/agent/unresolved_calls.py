"""Calls of subagents whose effect is not known when the subagent ends.

The model of the parent run reads an error then, and may call the subagent again. If the new run of the subagent makes
the same call, it is the same call for the receiver too: it gets the idempotency key of the first one. `on_interrupt` of
the tool decides if a person is asked before. The same holds for calls within one run (`RunState.inherited_calls`).
"""

from antiphon.agent.budget import Budget
from antiphon.agent.entries import UnresolvedCall
from antiphon.agent.journal import Journal
from antiphon.agent.run_state import RunState
from antiphon.tools.base import ToolInvocation


def list_unresolved(subagent: Journal, budget: Budget | None) -> list[UnresolvedCall]:
    """Return the calls of a subagent whose effect is not known when it ends, including those that it inherited."""
    running = [
        _make_unresolved(subagent, call, budget)
        for call in subagent.state.open_calls
        if call.call_id in subagent.state.started_calls
    ]
    state = subagent.state
    keys = {call.idempotency_key for call in running}
    return [*running, *(call for call in state.inherited_calls if call.idempotency_key not in keys)]


def _make_unresolved(subagent: Journal, call: ToolInvocation, budget: Budget | None) -> UnresolvedCall:
    state = subagent.state
    unresolved = UnresolvedCall(
        call.call_id, call.name, call.arguments, subagent.make_key(call), state.find_subagent_state(call)
    )
    repeated = state.find_inherited(call)
    if repeated is not None:
        unresolved = unresolved.add_counted(repeated.spent, repeated.tool_calls)
    return unresolved if budget is None else unresolved.add_counted(*budget.find_spent(call.call_id))


def find_inherited(parent: RunState, call_id: str) -> list[UnresolvedCall]:
    """Return the unresolved calls that the run of a subagent inherits from the runs before it.

    Only one of several concurrent runs inherits them: two calls must not have the same key.
    """
    call = parent.find_call(call_id)
    return list(parent.unresolved_calls.get(call.name, ())) if parent.is_first_of_tool(call) else []
