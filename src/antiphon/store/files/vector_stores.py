"""Vector stores, their files and their batches in the database of files."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from antiphon.store.base import Order
from antiphon.store.files.chunks import DELETE_CHUNKS, delete_entries, make_scope
from antiphon.store.files.paging import list_page
from antiphon.store.files.rows import BatchRow, EntryRow, NewEntry, StoreRow, Tally
from antiphon.store.limits import StoreLimits
from antiphon.store.object_limits import check_file_number
from antiphon.store.sql_steps import Batch, Lock, SqlStep, StepDatabase, Steps

_DAY = 24 * 3600
_CHECKED_BATCHES = 100
_STORE = """id, created_at, last_active_at, name, description, metadata, expires_days, embedding, is_expired, revision,
position"""
CREATE = """
INSERT INTO vector_stores
    (project, id, created_at, last_active_at, name, description, metadata, expires_days, embedding)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
COUNT_STORES = "SELECT count(*) FROM vector_stores WHERE project = ?"
COUNT_OTHERS = """
SELECT count(*) FROM entries WHERE project = ? AND store_id = ? AND position NOT IN (
    SELECT position FROM entries WHERE project = ? AND store_id = ? AND file_id IN TEXTS(?)
)
"""
COUNT_BATCHES = "SELECT count(*) FROM batches WHERE project = ? AND store_id = ?"
# Only the oldest are checked, so that the statement is quick.
FIND_FINISHED_BATCHES = f"""
SELECT project, id FROM (
    SELECT project, id, store_id, created_at FROM batches WHERE project = ? AND store_id = ? ORDER BY created_at, id
    LIMIT {_CHECKED_BATCHES}
) AS oldest
WHERE NOT EXISTS (
    SELECT 1 FROM batch_files JOIN entries ON entries.project = batch_files.project
        AND entries.store_id = oldest.store_id AND entries.file_id = batch_files.file_id
    WHERE batch_files.project = oldest.project AND batch_files.batch_id = oldest.id AND entries.status = 'in_progress'
)
ORDER BY created_at, id
"""
DELETE_FINISHED_FILES = "DELETE FROM batch_files WHERE project = ? AND batch_id = ?"
DELETE_FINISHED = "DELETE FROM batches WHERE project = ? AND id = ?"
LOAD = f"SELECT {_STORE} FROM vector_stores WHERE project = ? AND id = ?"
LIST = f"SELECT position, {_STORE} FROM vector_stores WHERE project = ?"
POSITION = "SELECT position FROM vector_stores WHERE project = ? AND id = ?"
DELETE = "DELETE FROM vector_stores WHERE project = ? AND id = ? RETURNING id"
STORE_ENTRIES = "SELECT position FROM entries WHERE project = ? AND store_id = ?"
DELETE_BATCH_FILES = """
DELETE FROM batch_files WHERE project = ?
    AND batch_id IN (SELECT id FROM batches WHERE project = ? AND store_id = ?)
"""
DELETE_BATCHES = "DELETE FROM batches WHERE project = ? AND store_id = ?"
SET_ACTIVE = "UPDATE vector_stores SET last_active_at = ? WHERE project = ? AND id = ? AND is_expired = 0"
LAPSED = f"""
SELECT project, id FROM vector_stores
WHERE expires_days IS NOT NULL AND is_expired = 0 AND last_active_at + expires_days * {_DAY} <= ?
LIMIT 20
"""
MARK_EXPIRED = "UPDATE vector_stores SET is_expired = 1, revision = revision + 1 WHERE project = ? AND id = ?"
TALLY = """
SELECT store_id, status, count(*), CAST(sum(usage_bytes) AS bigint) FROM entries
WHERE project = ? AND store_id IN TEXTS(?) GROUP BY store_id, status
"""
BATCH_TALLY = """
SELECT entries.status, count(*) FROM batch_files JOIN batches
    ON batches.project = batch_files.project AND batches.id = batch_files.batch_id
JOIN entries ON entries.project = batches.project AND entries.store_id = batches.store_id
    AND entries.file_id = batch_files.file_id
WHERE batch_files.project = ? AND batch_files.batch_id = ? GROUP BY entries.status
"""

_ENTRY = "file_id, created_at, attributes, chunk_tokens, overlap_tokens, status, error_code, error_message, usage_bytes"
ADD_ENTRY = """
INSERT INTO entries (project, store_id, file_id, created_at, attributes, chunk_tokens, overlap_tokens, status)
VALUES (?, ?, ?, ?, ?, ?, ?, 'in_progress')
"""
LOAD_ENTRY = f"SELECT position, {_ENTRY} FROM entries WHERE project = ? AND store_id = ? AND file_id = ?"
LIST_ENTRIES = f"""
SELECT position, position AS entry, {_ENTRY} FROM entries
WHERE project = ? AND store_id = ? AND (CAST(? AS text) IS NULL OR status = ?)
"""
LIST_BATCH_ENTRIES = f"""{LIST_ENTRIES}
    AND file_id IN (SELECT file_id FROM batch_files WHERE project = ? AND batch_id = ?)
"""
FIND_ENTRIES = "SELECT position FROM entries WHERE project = ? AND store_id = ? AND file_id IN TEXTS(?)"
ENTRY_POSITION = "SELECT position FROM entries WHERE project = ? AND file_id = ? AND store_id = ?"
SET_ATTRIBUTES = (
    "UPDATE entries SET attributes = ? WHERE project = ? AND store_id = ? AND file_id = ? RETURNING position"
)
CHANGED = "UPDATE vector_stores SET revision = revision + 1 WHERE project = ? AND id = ?"
ADD_BATCH = "INSERT INTO batches (project, id, store_id, created_at) VALUES (?, ?, ?, ?)"
ADD_BATCH_FILE = "INSERT INTO batch_files (project, batch_id, file_id) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
LOAD_BATCH = "SELECT id, store_id, created_at, is_cancelled FROM batches WHERE project = ? AND store_id = ? AND id = ?"
CANCEL_BATCH = "UPDATE batches SET is_cancelled = 1 WHERE project = ? AND store_id = ? AND id = ? RETURNING id"
CANCEL_ENTRIES = """
UPDATE entries SET status = 'cancelled', owner = NULL, leased_until = 0
WHERE project = ? AND store_id = ? AND status = 'in_progress'
    AND file_id IN (SELECT file_id FROM batch_files WHERE project = ? AND batch_id = ?)
RETURNING position
"""


class VectorStoreTable(StepDatabase):
    async def create_vector_store(self, project: str, store: StoreRow, entries: Sequence[NewEntry]) -> None:
        """Save a new vector store. Its files wait to be indexed."""
        await self._write(_create, project, store, entries, self._limits)

    async def load_vector_store(self, project: str, store_id: str) -> StoreRow | None:
        """Return a vector store. If it has expired, it has lost its files."""
        row = await self._find_store(project, store_id)
        if row is None or row.is_expired or row.expires_days is None:
            return row
        expires_at = row.last_active_at + row.expires_days * _DAY
        if expires_at > self._now() or expires_at > await self._limit_time(self._now()):
            return row
        await self._write(_expire, project, store_id)
        return await self._find_store(project, store_id)

    async def _find_store(self, project: str, store_id: str) -> StoreRow | None:
        rows = await self._fetch(LOAD, (project, store_id))
        return _read_store(rows[0]) if rows else None

    async def list_vector_stores(
        self, project: str, *, after: str | None, before: str | None, limit: int, order: Order
    ) -> tuple[list[StoreRow], bool]:
        await self.expire_vector_stores()
        rows, has_more = await self._read(
            list_page, LIST, (project,), POSITION, (project,), after, before, limit, order
        )
        return [_read_store(row) for row in rows], has_more

    async def expire_vector_stores(self) -> None:
        """Delete the files of expired vector stores of all projects."""
        now = await self._limit_time(self._now())
        while lapsed := await self._fetch(LAPSED, (now,)):
            for project, store_id in lapsed:
                await self._write(_expire, project, store_id)

    async def update_vector_store(self, project: str, store_id: str, changes: dict[str, Any]) -> bool:
        """Change columns of a vector store: `name`, `metadata` and `expires_days`. Return False if there is none."""
        done: bool = await self._write(_update, project, store_id, changes, int(self._now()))
        return done

    async def mark_active(self, project: str, store_id: str) -> None:
        """Record that a vector store is used now."""
        await self._change(SET_ACTIVE, (int(self._now()), project, store_id))

    async def delete_vector_store(self, project: str, store_id: str) -> bool:
        deleted: bool = await self._write(_delete, project, store_id)
        return deleted

    async def count_entries(self, project: str, store_ids: Collection[str]) -> dict[str, Tally]:
        """Return the tally of each vector store."""
        tallies = {store_id: Tally({}) for store_id in store_ids}
        for store_id, status, count, usage in await self._fetch(TALLY, (project, list(store_ids))):
            tally = tallies[store_id]
            tallies[store_id] = Tally(tally.counts | {status: count}, tally.usage_bytes + usage)
        return tallies

    async def attach_files(
        self, project: str, store_id: str, entries: Sequence[NewEntry], *, batch_id: str | None = None
    ) -> bool:
        """Add files to a vector store, perhaps as a batch. A file that it already has is indexed again.

        Return False if there is no such vector store.
        """
        added: bool = await self._write(_attach, project, store_id, entries, batch_id, int(self._now()), self._limits)
        return added

    async def load_entry(self, project: str, store_id: str, file_id: str) -> EntryRow | None:
        rows = await self._fetch(LOAD_ENTRY, (project, store_id, file_id))
        return _read_entry(rows[0]) if rows else None

    async def list_entries(
        self,
        project: str,
        store_id: str,
        *,
        status: str | None,
        batch_id: str | None = None,
        after: str | None,
        before: str | None,
        limit: int,
        order: Order,
    ) -> tuple[list[EntryRow], bool]:
        """Return a page of the files of a vector store, or of a batch."""
        select, parameters = LIST_ENTRIES, [project, store_id, status, status]
        if batch_id is not None:
            select, parameters = LIST_BATCH_ENTRIES, [*parameters, project, batch_id]
        rows, has_more = await self._read(
            list_page, select, parameters, ENTRY_POSITION, (project, store_id), after, before, limit, order
        )
        return [_read_entry(row) for row in rows], has_more

    async def set_attributes(
        self, project: str, store_id: str, file_id: str, attributes: dict[str, Any] | None
    ) -> bool:
        done: bool = await self._write(_set_attributes, project, store_id, file_id, attributes)
        return done

    async def detach_file(self, project: str, store_id: str, file_id: str) -> bool:
        """Remove a file from a vector store. Return False if it does not have it."""
        done: bool = await self._write(_detach, project, store_id, file_id)
        return done

    async def load_batch(self, project: str, store_id: str, batch_id: str) -> BatchRow | None:
        rows = await self._fetch(LOAD_BATCH, (project, store_id, batch_id))
        return BatchRow(*rows[0])._replace(is_cancelled=bool(rows[0][3])) if rows else None

    async def count_batch(self, project: str, batch_id: str) -> Tally:
        return Tally(dict(await self._fetch(BATCH_TALLY, (project, batch_id))))

    async def cancel_batch(self, project: str, store_id: str, batch_id: str) -> bool:
        """Cancel the files of a batch that are in progress. Return False if there is no such batch."""
        done: bool = await self._write(_cancel_batch, project, store_id, batch_id)
        return done


def _read_store(row: Sequence[Any]) -> StoreRow:
    store = StoreRow(*row)
    packed: Any = store.metadata
    return store._replace(
        metadata=None if packed is None else msgspec.json.decode(packed),
        is_expired=bool(store.is_expired),
        scope=make_scope(row[-1]),
    )


def _read_entry(row: Sequence[Any]) -> EntryRow:
    entry = EntryRow(*row)
    packed: Any = entry.attributes
    return entry._replace(attributes=None if packed is None else msgspec.json.decode(packed))


def _pack(value: object) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)


def _create(project: str, store: StoreRow, entries: Sequence[NewEntry], limits: StoreLimits) -> Steps[None]:
    yield Lock(f"vector stores of {project}")
    yield from check_file_number(
        COUNT_STORES,
        (project,),
        maximum=limits.max_vector_stores,
        objects="vector stores in this project",
        setting="max_vector_stores",
        param="name",
    )
    yield from _check_entries(project, store.id, entries, limits, "file_ids")
    yield SqlStep(
        CREATE,
        (
            project,
            store.id,
            store.created_at,
            store.last_active_at,
            store.name,
            store.description,
            _pack(store.metadata),
            store.expires_days,
            store.embedding,
        ),
    )
    yield from _add_entries(project, store.id, entries, store.created_at)


def _check_entries(
    project: str, store_id: str, entries: Sequence[NewEntry], limits: StoreLimits, param: str
) -> Steps[None]:
    yield from check_file_number(
        COUNT_OTHERS,
        (project, store_id, project, store_id, [entry.file_id for entry in entries]),
        added=len(entries),
        maximum=limits.max_vector_store_files,
        objects="files in the vector store",
        setting="max_vector_store_files",
        param=param,
    )


def _add_entries(project: str, store_id: str, entries: Sequence[NewEntry], now: int) -> Steps[None]:
    found = yield SqlStep(FIND_ENTRIES, (project, store_id, [entry.file_id for entry in entries]))
    yield from delete_entries([position for (position,) in found])
    rows = [
        (project, store_id, entry.file_id, now, _pack(entry.attributes), entry.chunk_tokens, entry.overlap_tokens)
        for entry in entries
    ]
    yield Batch(ADD_ENTRY, rows)


def _attach(
    project: str, store_id: str, entries: Sequence[NewEntry], batch_id: str | None, now: int, limits: StoreLimits
) -> Steps[bool]:
    yield Lock(f"vector stores of {project}")
    yield from _check_entries(project, store_id, entries, limits, "file_id" if batch_id is None else "file_ids")
    if batch_id is not None:
        yield from _make_room_for_batch(project, store_id, limits.max_vector_store_files)
    if not (yield SqlStep(f"{SET_ACTIVE} RETURNING id", (now, project, store_id))):
        return False
    if batch_id is not None:
        yield SqlStep(ADD_BATCH, (project, batch_id, store_id, now))
        yield Batch(ADD_BATCH_FILE, [(project, batch_id, entry.file_id) for entry in entries])
    yield from _add_entries(project, store_id, entries, now)
    return True


def _make_room_for_batch(project: str, store_id: str, maximum: int) -> Steps[None]:
    """Remove finished batches, the oldest first, so that a vector store does not exceed the maximum. Their files stay.

    If the maximum was reduced, each new batch removes several old ones. Raises InvalidRequest if none is finished.
    """
    ((number,),) = yield SqlStep(COUNT_BATCHES, (project, store_id))
    if number < maximum:
        return
    finished = yield SqlStep(FIND_FINISHED_BATCHES, (project, store_id))
    if not finished:
        yield from check_file_number(
            COUNT_BATCHES,
            (project, store_id),
            maximum=maximum,
            objects="batches of the vector store",
            setting="max_vector_store_files",
            param="file_ids",
            hint="Wait until older batches are finished.",
        )
    removed = finished[: number + 1 - maximum]
    yield Batch(DELETE_FINISHED_FILES, removed)
    yield Batch(DELETE_FINISHED, removed)


def _update(project: str, store_id: str, changes: dict[str, Any], now: int) -> Steps[bool]:
    values = {name: _pack(value) if name == "metadata" else value for name, value in changes.items()}
    values["last_active_at"] = now
    assignments = ", ".join(f"{name} = ?" for name in values)
    statement = f"UPDATE vector_stores SET {assignments} WHERE project = ? AND id = ? RETURNING id"
    return bool((yield SqlStep(statement, (*values.values(), project, store_id))))


def _delete(project: str, store_id: str) -> Steps[bool]:
    # The row first: it is locked, so no file is attached meanwhile.
    if not (yield SqlStep(DELETE, (project, store_id))):
        return False
    yield from _delete_content(project, store_id)
    return True


def _delete_content(project: str, store_id: str) -> Steps[None]:
    rows = yield SqlStep(STORE_ENTRIES, (project, store_id))
    yield from delete_entries([position for (position,) in rows])
    yield SqlStep(DELETE_BATCH_FILES, (project, project, store_id))
    yield SqlStep(DELETE_BATCHES, (project, store_id))


def _expire(project: str, store_id: str) -> Steps[None]:
    yield SqlStep(MARK_EXPIRED, (project, store_id))
    yield from _delete_content(project, store_id)


def _set_attributes(project: str, store_id: str, file_id: str, attributes: dict[str, Any] | None) -> Steps[bool]:
    if not (yield SqlStep(SET_ATTRIBUTES, (_pack(attributes), project, store_id, file_id))):
        return False
    yield SqlStep(CHANGED, (project, store_id))
    return True


def _detach(project: str, store_id: str, file_id: str) -> Steps[bool]:
    found = yield SqlStep(LOAD_ENTRY, (project, store_id, file_id))
    yield from delete_entries([row[0] for row in found])
    return bool(found)


def _cancel_batch(project: str, store_id: str, batch_id: str) -> Steps[bool]:
    if not (yield SqlStep(CANCEL_BATCH, (project, store_id, batch_id))):
        return False
    cancelled = yield SqlStep(CANCEL_ENTRIES, (project, store_id, project, batch_id))
    yield Batch(DELETE_CHUNKS, cancelled)
    return True
