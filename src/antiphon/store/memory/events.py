"""The event log in memory."""

from collections.abc import Sequence

from antiphon.errors import ServerError
from antiphon.store.memory.tables import Key, Memory
from antiphon.store.record import Batch, pack_events, unpack_events


class EventLog(Memory):
    async def append_events(
        self, project: str, response_id: str, first: int, payloads: Sequence[bytes], *, owner: str | None = None
    ) -> bool:
        key = project, response_id
        batch = pack_events(first, payloads)
        welcome = key in self._tables.responses if owner is None else self._holds(key, owner)
        if welcome and batch is not None:
            self._check_number(key, batch)
            self._tables.events.setdefault(key, []).append(batch)
        return welcome

    async def read_events(self, project: str, response_id: str, after: int) -> list[tuple[int, bytes]]:
        batches = self._tables.events.get((project, response_id), [])
        return [event for _, last, lines in batches if last > after for event in unpack_events(last, lines, after)]

    async def drop_events(self, project: str, response_id: str, *, owner: str | None = None) -> bool:
        key = project, response_id
        if owner is not None and (not self._holds(key, owner) or self._tables.runs[key].watched):
            return False
        self._tables.events.pop(key, None)
        return True

    def _check_number(self, key: Key, batch: Batch) -> None:
        batches = self._tables.events.get(key)
        if batches and batches[-1].last >= batch.first:
            raise ServerError(f"The event log of {key[1]} already reaches number {batch.first}.")
