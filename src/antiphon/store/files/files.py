"""Files and uploads in the database of files."""

import sqlite3
from collections.abc import Collection, Sequence

from antiphon.errors import BodyTooLarge, InvalidRequest
from antiphon.store.base import Order
from antiphon.store.files.chunks import delete_entries
from antiphon.store.files.paging import list_page
from antiphon.store.files.rows import FileRow, PartRow, UploadRow
from antiphon.store.sqlite.database import Database

_FILE = "id, created_at, expires_at, filename, bytes, purpose"
_LIVE = "(expires_at IS NULL OR expires_at > ?)"

SAVE = f"INSERT INTO files (project, {_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)"
LOAD = f"SELECT {_FILE} FROM files WHERE project = ? AND id = ? AND {_LIVE}"
LOAD_MANY = f"""
SELECT {_FILE} FROM files
WHERE project = ? AND id IN (SELECT value FROM json_each(?)) AND {_LIVE}
"""
LIST = f"SELECT position, {_FILE} FROM files WHERE project = ? AND {_LIVE} AND (? IS NULL OR purpose = ?)"
POSITION = f"SELECT position FROM files WHERE project = ? AND id = ? AND {_LIVE}"
DELETE = f"DELETE FROM files WHERE project = ? AND id = ? AND {_LIVE}"
ENTRIES_OF_FILE = "SELECT position FROM entries WHERE project = ? AND file_id = ?"
EXPIRED = "SELECT project, id FROM files WHERE expires_at <= ? LIMIT ?"
KNOWN = """
SELECT id FROM files WHERE id IN (SELECT value FROM json_each(?1))
UNION SELECT id FROM upload_parts WHERE id IN (SELECT value FROM json_each(?1))
"""
SUM_BYTES = "SELECT coalesce(sum(bytes), 0) FROM files WHERE project = ?"
SUM_PARTS = "SELECT coalesce(sum(bytes), 0) FROM upload_parts WHERE project = ? AND upload_id = ?"
SUM_ALL_PARTS = "SELECT coalesce(sum(bytes), 0) FROM upload_parts WHERE project = ?"

_UPLOAD = "id, created_at, expires_at, filename, bytes, purpose, mime_type, file_seconds, status, file_id"
SAVE_UPLOAD = f"INSERT INTO uploads (project, {_UPLOAD}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
LOAD_UPLOAD = f"SELECT {_UPLOAD} FROM uploads WHERE project = ? AND id = ?"
FINISH_UPLOAD = "UPDATE uploads SET status = ?, file_id = ? WHERE project = ? AND id = ? AND status = 'pending'"
IS_PENDING = "SELECT 1 FROM uploads WHERE project = ? AND id = ? AND status = 'pending' AND expires_at > ?"
SAVE_PART = "INSERT INTO upload_parts (project, upload_id, id, created_at, bytes) VALUES (?, ?, ?, ?, ?)"
LOAD_PARTS = "SELECT id, created_at, bytes FROM upload_parts WHERE project = ? AND upload_id = ? ORDER BY position"
DELETE_PARTS = "DELETE FROM upload_parts WHERE project = ? AND upload_id = ?"
EXPIRED_UPLOADS = "SELECT project, id FROM uploads WHERE expires_at <= ? LIMIT ?"
DELETE_UPLOAD = "DELETE FROM uploads WHERE project = ? AND id = ?"

_EXPIRY_STEP = 100


class FileTable(Database):
    async def save_file(self, project: str, file: FileRow, *, max_project_bytes: int | None = None) -> None:
        """Save a new file. Raises InvalidRequest if the files of the project would exceed the limit."""
        await self._writer.submit(_save_file, (project, file, max_project_bytes))

    async def load_file(self, project: str, file_id: str) -> FileRow | None:
        rows = await self._reader.submit(LOAD, (project, file_id, self._now()))
        return FileRow(*rows[0]) if rows else None

    async def load_files(self, project: str, file_ids: Collection[str]) -> dict[str, FileRow]:
        """Return the files with these ids. Ids without a file are missing in the result."""
        import json

        rows = await self._reader.submit(LOAD_MANY, (project, json.dumps(list(file_ids)), self._now()))
        return {row[0]: FileRow(*row) for row in rows}

    async def list_files(
        self, project: str, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> tuple[list[FileRow], bool]:
        """Return a page of files, and True if there are more after it. Raises InvalidRequest for an unknown `after`."""
        now = self._now()
        rows, has_more = await self._reader.submit(
            list_page, (LIST, (project, now, purpose, purpose), POSITION, (project, now), after, None, limit, order)
        )
        return [FileRow(*row) for row in rows], has_more

    async def delete_file(self, project: str, file_id: str) -> bool:
        """Delete a file and detach it from every vector store. Return False if there was none."""
        deleted: bool = await self._writer.submit(_delete_file, (project, file_id, self._now()))
        return deleted

    async def save_upload(self, project: str, upload: UploadRow) -> None:
        await self._writer.submit(SAVE_UPLOAD, (project, *upload))

    async def load_upload(self, project: str, upload_id: str) -> UploadRow | None:
        rows = await self._reader.submit(LOAD_UPLOAD, (project, upload_id))
        return UploadRow(*rows[0]) if rows else None

    async def save_part(
        self,
        project: str,
        upload_id: str,
        part: PartRow,
        *,
        max_upload_bytes: int | None = None,
        max_project_bytes: int | None = None,
    ) -> bool:
        """Save a part of an upload. Return False if the upload is not pending.

        Raises InvalidRequest if the parts of the upload, or the files and parts of the project, would exceed a limit.
        """
        limits = max_upload_bytes, max_project_bytes
        saved: bool = await self._writer.submit(_save_part, (project, upload_id, part, self._now(), *limits))
        return saved

    async def load_parts(self, project: str, upload_id: str) -> list[PartRow]:
        return [PartRow(*row) for row in await self._reader.submit(LOAD_PARTS, (project, upload_id))]

    async def complete_upload(
        self, project: str, upload_id: str, file: FileRow, *, max_project_bytes: int | None = None
    ) -> bool:
        """Save the file of a pending upload and delete its parts. Return False if the upload is not pending."""
        done: bool = await self._writer.submit(_complete_upload, (project, upload_id, file, max_project_bytes))
        return done

    async def cancel_upload(self, project: str, upload_id: str) -> bool:
        """Cancel a pending upload and delete its parts. Return False if it is not pending."""
        done: bool = await self._writer.submit(_cancel_upload, (project, upload_id))
        return done

    async def expire_files(self, now: int) -> list[str]:
        """Delete expired files and uploads of all projects. Return the ids of the contents that are not used any more.

        Completed uploads are deleted too. Their files stay.
        """
        unused: list[str] = []
        while found := await self._writer.submit(_expire_files, (now,)):
            unused += found
        while True:
            uploads, parts = await self._writer.submit(_expire_uploads, (now,))
            unused += parts
            if not uploads:
                return unused

    async def find_unknown_contents(self, content_ids: Sequence[str]) -> list[str]:
        """Return the ids that neither a file nor a part of an upload has."""
        import json

        rows = await self._reader.submit(KNOWN, (json.dumps(list(content_ids)),))
        known = {content_id for (content_id,) in rows}
        return [content_id for content_id in content_ids if content_id not in known]


def _save_file(connection: sqlite3.Connection, project: str, file: FileRow, max_project_bytes: int | None) -> None:
    if max_project_bytes is not None:
        (used,) = connection.execute(SUM_BYTES, (project,)).fetchone()
        _check_quota(used + file.bytes, max_project_bytes, param="file")
    connection.execute(SAVE, (project, *file))


def _check_quota(size: int, max_project_bytes: int, *, param: str) -> None:
    if size > max_project_bytes:
        raise InvalidRequest(
            f"The files of the project would have {size} bytes. This server stores at most "
            f"{max_project_bytes} for a project (setting files.max_project_bytes). Delete files first.",
            param=param,
            code="file_quota_exceeded",
        )


def _delete_file(connection: sqlite3.Connection, project: str, file_id: str, now: float) -> bool:
    if not connection.execute(DELETE, (project, file_id, now)).rowcount:
        return False
    delete_entries(connection, [row[0] for row in connection.execute(ENTRIES_OF_FILE, (project, file_id))])
    return True


def _save_part(
    connection: sqlite3.Connection,
    project: str,
    upload_id: str,
    part: PartRow,
    now: float,
    max_upload_bytes: int | None,
    max_project_bytes: int | None,
) -> bool:
    if connection.execute(IS_PENDING, (project, upload_id, now)).fetchone() is None:
        return False
    (size,) = connection.execute(SUM_PARTS, (project, upload_id)).fetchone()
    if max_upload_bytes is not None and size + part.bytes > max_upload_bytes:
        raise BodyTooLarge(
            f"The parts of the upload would have {size + part.bytes} bytes. This server accepts at most "
            f"{max_upload_bytes} (setting files.max_upload_bytes).",
            param="data",
        )
    if max_project_bytes is not None:
        (files,) = connection.execute(SUM_BYTES, (project,)).fetchone()
        (parts,) = connection.execute(SUM_ALL_PARTS, (project,)).fetchone()
        _check_quota(files + parts + part.bytes, max_project_bytes, param="data")
    connection.execute(SAVE_PART, (project, upload_id, *part))
    return True


def _complete_upload(
    connection: sqlite3.Connection, project: str, upload_id: str, file: FileRow, max_project_bytes: int | None
) -> bool:
    if not connection.execute(FINISH_UPLOAD, ("completed", file.id, project, upload_id)).rowcount:
        return False
    _save_file(connection, project, file, max_project_bytes)
    connection.execute(DELETE_PARTS, (project, upload_id))
    return True


def _cancel_upload(connection: sqlite3.Connection, project: str, upload_id: str) -> bool:
    if not connection.execute(FINISH_UPLOAD, ("cancelled", None, project, upload_id)).rowcount:
        return False
    connection.execute(DELETE_PARTS, (project, upload_id))
    return True


def _expire_files(connection: sqlite3.Connection, now: int) -> list[str]:
    expired = connection.execute(EXPIRED, (now, _EXPIRY_STEP)).fetchall()
    for project, file_id in expired:
        connection.execute("DELETE FROM files WHERE project = ? AND id = ?", (project, file_id))
        delete_entries(connection, [row[0] for row in connection.execute(ENTRIES_OF_FILE, (project, file_id))])
    return [file_id for _, file_id in expired]


def _expire_uploads(connection: sqlite3.Connection, now: int) -> tuple[int, list[str]]:
    expired = connection.execute(EXPIRED_UPLOADS, (now, _EXPIRY_STEP)).fetchall()
    parts: list[str] = []
    for key in expired:
        parts += [row[0] for row in connection.execute(LOAD_PARTS, key)]
        connection.execute(DELETE_PARTS, key)
        connection.execute(DELETE_UPLOAD, key)
    return len(expired), parts
