"""A store that forgets everything with its process: for trials and tests."""

from antiphon.errors import Unavailable
from antiphon.store.base import Link, StoredResponse
from antiphon.store.record import Record, pack, unpack, walk


class MemoryStore:
    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Record] | None = None

    async def open(self) -> None:
        self._kept = {}

    async def close(self) -> None:
        self._kept = None

    async def save(self, project: str, stored: StoredResponse) -> None:
        record = pack(stored)
        self._records[project, record.id] = record

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        record = self._records.get((project, response_id))
        if record is None:
            return None
        return unpack(record.id, record.input, record.output, record.body)

    async def delete(self, project: str, response_id: str) -> bool:
        return self._records.pop((project, response_id), None) is not None

    async def chain(self, project: str, response_id: str) -> list[Link]:
        records = self._records
        return walk(response_id, lambda wanted: records.get((project, wanted)))

    @property
    def _records(self) -> dict[tuple[str, str], Record]:
        if self._kept is None:
            raise Unavailable("The store is not open.")
        return self._kept
