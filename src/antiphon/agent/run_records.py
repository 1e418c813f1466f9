"""The runs in a ledger: list them, read one, delete one, and delete the old ones."""

import time
from collections.abc import Collection

from msgspec import UNSET, Struct, structs

from antiphon.agent.budget import Budget
from antiphon.agent.entries import EndEntry
from antiphon.agent.journal import Journal, load
from antiphon.agent.limits import Prices
from antiphon.agent.outcome import RunError
from antiphon.agent.ownership import is_executed
from antiphon.agent.resume import FINISHED, is_interrupted
from antiphon.agent.task import Task
from antiphon.errors import InvalidRequest
from antiphon.ledger import Lease, Ledger, RunSummary, RunTaken, find_first_run
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.response import Usage
from antiphon.tools.base import PendingToolCall

RUNNING, INTERRUPTED = "running", "interrupted"

_ALL_RUNS = 2**31 - 1


class RunRecord(Struct, frozen=True, kw_only=True):
    """A run in a ledger. Its totals include those of subagents that have finished or wait for approval.

    `status` is the kind of the outcome, `running` while a process executes the run, or `interrupted` if its process has
    ended before the run. `pending` are the calls that wait for a person. A call that may have happened waits for one
    only if the `on_interrupt` of its tool is "ask". `cost` is None if the prices are not known. `error` is that of the
    outcome.
    """

    run_id: str
    status: str
    agent: str
    model: str
    started_at: float
    turns: int
    tool_calls: int
    usage: Usage
    cost: float | None = None
    currency: str | None = None
    pending: tuple[PendingToolCall, ...] = ()
    history: tuple[JsonObject, ...] = ()
    error: RunError | None = None


async def list_runs(ledger: Ledger, *, limit: int = 100) -> list[RunSummary]:
    """Return the newest runs without those of subagents, which belong to the run of their parent.

    The status of a run whose process has ended before the run is `interrupted`.
    """
    wanted = limit
    while True:
        runs = await ledger.runs(limit=wanted)
        listed = [each for each in runs if find_first_run(each.run_id) is None]
        if len(listed) >= limit or len(runs) < wanted:
            return [structs.replace(each, status=_find_status(each.status, each.lease)) for each in listed[:limit]]
        wanted *= 4


async def read_run(ledger: Ledger, run_id: str, *, prices: Prices | None = None) -> RunRecord:
    """Return a run. `prices` apply to a run without an end, which has no cost yet.

    Raises InvalidRequest if there is no run with this id.
    """
    journal = await load(run_id, ledger)
    return describe_run(journal, await ledger.find_lease(run_id), prices=prices)


def describe_run(journal: Journal, lease: Lease | None, *, prices: Prices | None = None) -> RunRecord:
    state = journal.state
    status = _find_status(RUNNING, lease) if state.ended is None else state.ended.kind
    budget = Budget(state, Task(prices=prices))
    cost, currency = (budget.cost, budget.currency) if state.ended is None else _read_cost(state.ended)
    return RunRecord(
        run_id=journal.run_id,
        status=status,
        agent=state.agent,
        model=state.overrides.model or state.model,
        started_at=state.started_at,
        turns=state.turns,
        tool_calls=budget.tool_calls,
        usage=budget.usage,
        cost=cost,
        currency=currency,
        pending=() if status == RUNNING else tuple(_find_pending(journal)),
        history=tuple(state.conversation),
        error=None if state.ended is None else state.ended.error,
    )


async def delete_run(ledger: Ledger, run_id: str, *, force: bool = False) -> None:
    """Delete a run and the runs of its subagents.

    Raises InvalidRequest if there is no such run, or if it is the run of a subagent, and RunTaken if a process executes
    it. With `force` it is deleted even then: that process stops before its next tool call.
    """
    lease = await ledger.find_lease(run_id)
    first = find_first_run(run_id)
    if lease is None:
        raise InvalidRequest(f"There is no run with id '{run_id}'.", param="run_id", code="run_not_found")
    if first is not None and await ledger.find_lease(first) is not None:
        raise InvalidRequest(
            f"The run '{run_id}' is of a subagent: delete the run '{first}'.", param="run_id", code="subagent_run"
        )
    if is_executed(lease) and not force:
        raise RunTaken(run_id, f"A process is executing the run '{run_id}'. Delete it with force to stop that process.")
    if not await ledger.delete(run_id, owner=lease.owner):
        raise RunTaken(run_id)


async def prune_runs(
    ledger: Ledger, *, older_than: float, statuses: Collection[str] | None = FINISHED, dry_run: bool = False
) -> list[str]:
    """Delete the runs whose last entry is older than this number of seconds, and return their ids, oldest first.

    `statuses` are those of the runs to delete; None is all. A run that a process executes is never deleted. With
    `dry_run` nothing is deleted.
    """
    if older_than < 0:
        raise InvalidRequest("older_than must be at least 0 seconds.", param="older_than")
    if isinstance(statuses, str):
        # Its parts would count as statuses, too.
        raise InvalidRequest(f"statuses: expected a list of statuses, such as [{statuses!r}].", param="statuses")
    before = time.time() - older_than
    pruned = []
    for each in reversed(await list_runs(ledger, limit=_ALL_RUNS)):
        if each.updated_at > before or each.status == RUNNING or (statuses is not None and each.status not in statuses):
            continue
        if dry_run or await ledger.delete(each.run_id, owner="" if each.lease is None else each.lease.owner):
            pruned.append(each.run_id)
    return pruned


def _find_status(status: str, lease: Lease | None) -> str:
    if status != RUNNING:
        return status
    return RUNNING if is_executed(lease) else INTERRUPTED


def _read_cost(ended: EndEntry) -> tuple[float | None, str | None]:
    return (None, None) if ended.cost is UNSET else (ended.cost, ended.currency or None)


def _find_pending(journal: Journal) -> list[PendingToolCall]:
    """Return the calls that wait for a person, with those of subagents."""
    state = journal.state
    found = []
    for call in state.open_calls:
        paused = state.paused_calls.get(call.call_id)
        if paused is not None:
            found += [
                PendingToolCall(
                    each.call_id,
                    each.name,
                    each.arguments,
                    each.reason or "needs_approval",
                    each.idempotency_key or "",
                )
                for each in paused.calls
            ]
        elif is_interrupted(state, call):
            found.append(journal.make_pending(call, "may_have_happened"))
        elif state.ended is not None and state.ended.kind == "needs_approval":
            found.append(journal.make_pending(call, "needs_approval"))
    return found
