"""What the store says of the runs, and what DBOS says: where they differ, the store is right.

Processes are killed between two steps, databases are restored, tools of DBOS are used. So DBOS may not know of a run,
may hold one that has ended, may have handed one out to nobody, or keep one for processes that are gone.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from antiphon.store.base import ListedRun, RunKey, Store

if TYPE_CHECKING:  # it takes DBOS with it
    from antiphon.engine.workflows.client import Client, Workflow

# For so long DBOS's own tools can show a run that has ended.
SHOWN_SECONDS = 24 * 3600

# An executor is one of a process's instances of DBOS: the owner's name, this, and a number.
EXECUTOR_MARK = "-"

_ACTIVE = ["ENQUEUED", "PENDING"]
_ENDED = ["SUCCESS", "ERROR", "CANCELLED"]
_MOST_AT_ONCE = 1000


class Comparison:
    """Looks after the runs that are `ours`, as the owner says. `cancel` ends one that is worked on here."""

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        ours: Callable[[ListedRun], bool],
        cancel: Callable[[RunKey], object],
    ) -> None:
        self._store = store
        self._owner = owner
        self._is_ours = ours
        self._cancel = cancel
        # What may be about to begin or to end. If it looks the same the next time, it is not.
        self._suspects: set[tuple[str, Workflow]] = set()

    async def look(self, client: "Client") -> bool:
        """Whether there are any runs of ours."""
        # In this order: what DBOS has was in the store before, and what has ended in the store ends there afterwards.
        active = await client.list(status=_ACTIVE)
        runs = {run.key.response_id: run for run in await self._store.list_runs(self._owner, as_of=time.time())}
        ours = {response_id: run for response_id, run in runs.items() if self._is_ours(run)}
        # Handed out, but the run is nobody's, or there is none.
        suspects = {
            (response_id, workflow)
            for response_id, workflow in active.items()
            if workflow.status == "PENDING" and (response_id not in runs or runs[response_id].free)
        }
        sure = {response_id for response_id, workflow in suspects if _has_died(workflow, runs.get(response_id))}
        sure |= {response_id for response_id, _ in suspects & self._suspects}
        self._suspects = suspects
        idle = sure | {response_id for response_id, workflow in active.items() if workflow.status == "ENQUEUED"}
        kept_for_others = {each for each in idle & ours.keys() if active[each].version != client.version}
        await client.delete(kept_for_others | (idle - runs.keys()))
        await client.resume((sure & ours.keys()) - kept_for_others)
        unknown = kept_for_others | (ours.keys() - active.keys())
        await self._tell_again(client, [run.key for response_id, run in ours.items() if response_id in unknown])
        return bool(ours)

    async def clear(self, client: "Client") -> None:
        """Forget what ended long ago."""
        before = datetime.fromtimestamp(time.time() - SHOWN_SECONDS, UTC).isoformat()
        while old := await client.list(status=_ENDED, end_time=before, limit=_MOST_AT_ONCE):
            await client.delete(old)

    async def _tell_again(self, client: "Client", keys: Sequence[RunKey]) -> None:
        known = await client.find([key.response_id for key in keys])
        for key in keys:
            status = known[key.response_id].status if key.response_id in known else None
            if status == "CANCELLED":  # with a tool of DBOS
                await self._store.request_cancel(*key)
                self._cancel(key)
                continue
            if status in _ENDED:
                await client.delete([key.response_id])
            await client.enqueue(key)


def _has_died(workflow: "Workflow", run: ListedRun | None) -> bool:
    """Whether the process that this was handed out to had claimed the run, and is gone."""
    owner, _, _ = (workflow.executor_id or "").partition(EXECUTOR_MARK)
    return run is not None and run.free and run.owner == owner
