"""The queue of background runs in memory. A dictionary keeps its keys in the order in which they came."""

from antiphon.errors import ServerError
from antiphon.store.base import ClaimedRun, RunKey, StoredResponse
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
        self._tables.runs[key] = RunRow(request=request)
        self._note_items(key, find_foreign(stored))

    async def claim(self, owner: str, *, now: float, lease: float, limit: int) -> list[ClaimedRun]:
        free = [
            (key, run)
            for key, run in self._tables.runs.items()
            if run.owner is None or (run.owner != owner and run.leased_until <= now)
        ]
        claimed = []
        for (project, response_id), run in free:
            if not run.cancelled:
                if limit <= 0:
                    continue
                limit -= 1
            run.owner, run.leased_until, run.attempt = owner, now + lease, run.attempt + 1
            claimed.append(ClaimedRun(project, response_id, run.request, run.attempt, run.watched, run.cancelled))
        return claimed

    async def renew(self, owner: str, *, now: float, lease: float) -> dict[RunKey, bool]:
        held = [(key, run) for key, run in self._tables.runs.items() if run.owner == owner]
        for _, run in held:
            run.leased_until = now + lease
        return {RunKey(*key): run.cancelled for key, run in held}

    async def release(self, owner: str) -> None:
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.owner = None

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
