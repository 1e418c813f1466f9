"""The queue of background runs in memory. A dictionary keeps its keys in the order in which they came."""

from collections import Counter
from collections.abc import Mapping

from antiphon.errors import ServerError
from antiphon.store.base import NO_LIMITS, ClaimedRun, RunKey, StoredResponse
from antiphon.store.limits import START_WINDOW, Admission, RunLimits
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
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        patience: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        admission = self._open_admission(owner, as_of, limit, limits)
        claimed = []
        for key, run in self._tables.runs.items():
            if not _is_free(run, owner, as_of):
                continue
            project, response_id = key
            if not run.cancelled:
                if not admission.admit(project, attempt=run.attempt):
                    continue
                if run.attempt == 0 and limits.starts_per_minute is not None:
                    self._tables.run_starts.append(self._now())
            claimed.append(self._take(RunKey(project, response_id), run, owner, lease))
        return claimed

    def _open_admission(self, owner: str, as_of: float, limit: int, limits: RunLimits) -> Admission:
        active = Counter(
            project for (project, _), run in self._tables.runs.items() if run.owner and not _is_free(run, owner, as_of)
        )
        now = self._now()
        # A start later than now was recorded before the clock was set back.
        recent = (min(each, now) for each in self._tables.run_starts)
        self._tables.run_starts = [each for each in recent if each > now - START_WINDOW]
        return Admission(limits, slots=limit, active=active, starts=len(self._tables.run_starts))

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
