"""The queue of background runs in memory. A dictionary keeps its keys in the order in which they came."""

from collections.abc import Mapping

from antiphon.errors import ServerError
from antiphon.store.base import ClaimedRun, ListedRun, RunKey, StoredResponse
from antiphon.store.memory.references import References
from antiphon.store.memory.tables import RunRow
from antiphon.store.record import find_foreign, pack


class RunQueue(References):
    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        record = pack(stored)
        key = project, record.id
        if key in self._tables.responses:
            raise ServerError(f"The store already has a response {record.id}.")
        self._tables.responses[key] = record
        self._tables.runs[key] = RunRow(request=request, model=stored.response.model, free_since=self._now())
        self._note_items(key, find_foreign(stored))

    async def claim(
        self, owner: str, *, as_of: float, lease: float, limit: int, patience: Mapping[str, float] | None = None
    ) -> list[ClaimedRun]:
        free = [(RunKey(*key), run) for key, run in self._tables.runs.items() if _is_free(run, owner, as_of)]
        claimed = []
        for key, run in free:
            if not run.cancelled:
                if limit <= 0:
                    continue
                limit -= 1
            claimed.append(self._take(key, run, owner, lease))
        return claimed

    async def claim_one(self, owner: str, key: RunKey, *, as_of: float, lease: float) -> ClaimedRun | None:
        run = self._tables.runs.get(key)
        return self._take(key, run, owner, lease) if run is not None and _is_free(run, owner, as_of) else None

    async def list_runs(self, owner: str, *, as_of: float) -> list[ListedRun]:
        return [
            ListedRun(
                key=RunKey(*key),
                free=_is_free(run, owner, as_of),
                owner=run.owner or None,
                ours=True,
                model=run.model,
                free_since=run.free_since if run.owner is None else run.leased_until,
            )
            for key, run in self._tables.runs.items()
        ]

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        now = self._now()
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.leased_until, run.lease = now + lease, lease
            run.leased_until = min(run.leased_until, now + run.lease)
        return {RunKey(*key): run.cancelled for key, run in self._tables.runs.items() if run.owner == owner}

    async def release(self, owner: str) -> None:
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.owner, run.free_since = None, self._now()

    async def put_back(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        if self._holds((project, response_id), owner):
            run = self._tables.runs[project, response_id]
            run.owner, run.free_since = None, free_since

    async def abandon(self, owner: str, project: str, response_id: str) -> None:
        if self._holds((project, response_id), owner):
            self._tables.runs[project, response_id].owner = ""  # nobody's name, under the lease that is left

    async def watch(self, project: str, response_id: str) -> bool:
        run = self._tables.runs.get((project, response_id))
        if run is not None:
            run.watched = True
        return run is not None

    async def request_cancel(self, project: str, response_id: str) -> bool:
        run = self._tables.runs.get((project, response_id))
        if run is not None:
            run.cancelled = True
        return run is not None

    def _take(self, key: RunKey, run: RunRow, owner: str, lease: float) -> ClaimedRun:
        if run.owner is not None:
            run.interruptions, run.free_since = run.interruptions + 1, run.leased_until
        run.owner, run.leased_until, run.lease, run.attempt = owner, self._now() + lease, lease, run.attempt + 1
        # What is in memory was enqueued by this process: there is nobody to whom anything could be left.
        return ClaimedRun(
            *key,
            run.request,
            run.attempt,
            run.watched,
            run.cancelled,
            run.interruptions,
            run.model,
            ours=True,
            free_since=run.free_since,
        )


def _is_free(run: RunRow, owner: str, as_of: float) -> bool:
    return run.owner is None or (run.owner != owner and run.leased_until <= as_of)
