"""Files and uploads in the database of files."""

from collections.abc import Collection, Sequence

from antiphon.errors import BodyTooLarge, InvalidRequest
from antiphon.store.base import Order
from antiphon.store.files.chunks import delete_entries
from antiphon.store.files.paging import list_page
from antiphon.store.files.rows import FileRow, PartRow, UploadRow
from antiphon.store.limits import StoreLimits
from antiphon.store.object_limits import check_file_number
from antiphon.store.sql_steps import Lock, SqlStep, StepDatabase, Steps

_FILE = "id, created_at, expires_at, filename, bytes, purpose"
_LIVE = "(expires_at IS NULL OR expires_at > ?)"

SAVE = f"INSERT INTO files (project, {_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)"
LOAD = f"SELECT {_FILE} FROM files WHERE project = ? AND id = ? AND {_LIVE}"
LOAD_MANY = f"""
SELECT {_FILE} FROM files
WHERE project = ? AND id IN TEXTS(?) AND {_LIVE}
"""
LIST = f"SELECT position, {_FILE} FROM files WHERE project = ? AND {_LIVE} AND (CAST(? AS text) IS NULL OR purpose = ?)"
POSITION = f"SELECT position FROM files WHERE project = ? AND id = ? AND {_LIVE}"
DELETE = f"DELETE FROM files WHERE project = ? AND id = ? AND {_LIVE} RETURNING id"
DELETE_EXPIRED = "DELETE FROM files WHERE project = ? AND id = ?"
ENTRIES_OF_FILE = "SELECT position FROM entries WHERE project = ? AND file_id = ?"
EXPIRED = "SELECT project, id FROM files WHERE expires_at <= ? LIMIT ?"
KNOWN = """
SELECT id FROM files WHERE id IN TEXTS(?) UNION SELECT id FROM upload_parts WHERE id IN TEXTS(?)
"""
SUM_BYTES = "SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM files WHERE project = ?"
COUNT_FILES = "SELECT count(*) FROM files WHERE project = ?"
COUNT_UPLOADS = "SELECT count(*) FROM uploads WHERE project = ?"
COUNT_PARTS = "SELECT count(*) FROM upload_parts WHERE project = ? AND upload_id = ?"
SUM_PARTS = "SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM upload_parts WHERE project = ? AND upload_id = ?"
SUM_ALL_PARTS = "SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM upload_parts WHERE project = ?"

_UPLOAD = "id, created_at, expires_at, filename, bytes, purpose, mime_type, file_seconds, status, file_id"
SAVE_UPLOAD = f"INSERT INTO uploads (project, {_UPLOAD}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
LOAD_UPLOAD = f"SELECT {_UPLOAD} FROM uploads WHERE project = ? AND id = ?"
FINISH_UPLOAD = (
    "UPDATE uploads SET status = ?, file_id = ? WHERE project = ? AND id = ? AND status = 'pending' RETURNING id"
)
IS_PENDING = "SELECT 1 FROM uploads WHERE project = ? AND id = ? AND status = 'pending' AND expires_at > ?"
SAVE_PART = "INSERT INTO upload_parts (project, upload_id, id, created_at, bytes) VALUES (?, ?, ?, ?, ?)"
LOAD_PARTS = "SELECT id, created_at, bytes FROM upload_parts WHERE project = ? AND upload_id = ? ORDER BY position"
DELETE_PARTS = "DELETE FROM upload_parts WHERE project = ? AND upload_id = ?"
EXPIRED_UPLOADS = "SELECT project, id FROM uploads WHERE expires_at <= ? LIMIT ?"
DELETE_UPLOAD = "DELETE FROM uploads WHERE project = ? AND id = ?"

_EXPIRY_STEP = 100


class FileTable(StepDatabase):
    async def save_file(self, project: str, file: FileRow, *, max_project_bytes: int | None = None) -> None:
        """Save a new file. Raises InvalidRequest if the files of the project would exceed the limit."""
        await self._write(_save_file, project, file, max_project_bytes, self._limits)

    async def load_file(self, project: str, file_id: str) -> FileRow | None:
        rows = await self._fetch(LOAD, (project, file_id, int(self._now())))
        return FileRow(*rows[0]) if rows else None

    async def load_files(self, project: str, file_ids: Collection[str]) -> dict[str, FileRow]:
        """Return the files with these ids. Ids without a file are missing in the result."""
        rows = await self._fetch(LOAD_MANY, (project, list(file_ids), int(self._now())))
        return {row[0]: FileRow(*row) for row in rows}

    async def list_files(
        self, project: str, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> tuple[list[FileRow], bool]:
        """Return a page of files, and True if there are more after it. Raises InvalidRequest for an unknown `after`."""
        now = int(self._now())
        rows, has_more = await self._read(
            list_page, LIST, (project, now, purpose, purpose), POSITION, (project, now), after, None, limit, order
        )
        return [FileRow(*row) for row in rows], has_more

    async def delete_file(self, project: str, file_id: str) -> bool:
        """Delete a file and detach it from every vector store. Return False if there was none."""
        deleted: bool = await self._write(_delete_file, project, file_id, int(self._now()))
        return deleted

    async def save_upload(self, project: str, upload: UploadRow) -> None:
        await self._write(_save_upload, project, upload, self._limits)

    async def load_upload(self, project: str, upload_id: str) -> UploadRow | None:
        rows = await self._fetch(LOAD_UPLOAD, (project, upload_id))
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
        saved: bool = await self._write(_save_part, project, upload_id, part, int(self._now()), *limits, self._limits)
        return saved

    async def load_parts(self, project: str, upload_id: str) -> list[PartRow]:
        return [PartRow(*row) for row in await self._fetch(LOAD_PARTS, (project, upload_id))]

    async def complete_upload(
        self, project: str, upload_id: str, file: FileRow, *, max_project_bytes: int | None = None
    ) -> bool:
        """Save the file of a pending upload and delete its parts. Return False if the upload is not pending."""
        done: bool = await self._write(_complete_upload, project, upload_id, file, max_project_bytes, self._limits)
        return done

    async def cancel_upload(self, project: str, upload_id: str) -> bool:
        """Cancel a pending upload and delete its parts. Return False if it is not pending."""
        done: bool = await self._write(_cancel_upload, project, upload_id)
        return done

    async def expire_files(self, now: int) -> list[str]:
        """Delete expired files and uploads of all projects. Return the ids of the contents that are not used any more.

        Completed uploads are deleted too. Their files stay.
        """
        now = await self._limit_time(now)
        unused: list[str] = []
        while found := await self._write(_expire_files, now):
            unused += found
        while True:
            uploads, parts = await self._write(_expire_uploads, now)
            unused += parts
            if not uploads:
                return unused

    async def find_unknown_contents(self, content_ids: Sequence[str]) -> list[str]:
        """Return the ids that neither a file nor a part of an upload has."""
        rows = await self._fetch(KNOWN, (list(content_ids), list(content_ids)))
        known = {content_id for (content_id,) in rows}
        return [content_id for content_id in content_ids if content_id not in known]


def _save_file(project: str, file: FileRow, max_project_bytes: int | None, limits: StoreLimits) -> Steps[None]:
    yield from _check_project(project, file.bytes, max_project_bytes, limits)
    yield SqlStep(SAVE, (project, *file))


def _save_upload(project: str, upload: UploadRow, limits: StoreLimits) -> Steps[None]:
    yield _lock(project)
    yield from check_file_number(
        COUNT_UPLOADS,
        (project,),
        maximum=limits.max_uploads,
        objects="uploads in this project",
        setting="max_uploads",
        param="filename",
        hint="Wait until some have expired: completed and cancelled ones count, too.",
    )
    yield SqlStep(SAVE_UPLOAD, (project, *upload))


def _check_project(project: str, size: int, max_project_bytes: int | None, limits: StoreLimits) -> Steps[None]:
    yield _lock(project)
    yield from check_file_number(
        COUNT_FILES,
        (project,),
        maximum=limits.max_files,
        objects="files in this project",
        setting="max_files",
        param="file",
    )
    if max_project_bytes is not None:
        ((used,),) = yield SqlStep(SUM_BYTES, (project,))
        _check_quota(used + size, max_project_bytes, param="file")


def _lock(project: str) -> Lock:
    return Lock(f"files of {project}")


def _check_quota(size: int, max_project_bytes: int, *, param: str) -> None:
    if size > max_project_bytes:
        raise InvalidRequest(
            f"The files of the project would have {size} bytes. This server stores at most "
            f"{max_project_bytes} for a project (setting files.max_project_bytes). Delete files first.",
            param=param,
            code="file_quota_exceeded",
        )


def _delete_file(project: str, file_id: str, now: int) -> Steps[bool]:
    if not (yield SqlStep(DELETE, (project, file_id, now))):
        return False
    rows = yield SqlStep(ENTRIES_OF_FILE, (project, file_id))
    yield from delete_entries([position for (position,) in rows])
    return True


def _save_part(
    project: str,
    upload_id: str,
    part: PartRow,
    now: int,
    max_upload_bytes: int | None,
    max_project_bytes: int | None,
    limits: StoreLimits,
) -> Steps[bool]:
    yield _lock(project)
    if not (yield SqlStep(IS_PENDING, (project, upload_id, now))):
        return False
    yield from check_file_number(
        COUNT_PARTS,
        (project, upload_id),
        maximum=limits.max_upload_parts,
        objects="parts of the upload",
        setting="max_upload_parts",
        param="data",
        hint="Send larger parts.",
    )
    ((size,),) = yield SqlStep(SUM_PARTS, (project, upload_id))
    if max_upload_bytes is not None and size + part.bytes > max_upload_bytes:
        raise BodyTooLarge(
            f"The parts of the upload would have {size + part.bytes} bytes. This server accepts at most "
            f"{max_upload_bytes} (setting files.max_upload_bytes).",
            param="data",
        )
    if max_project_bytes is not None:
        ((files,),) = yield SqlStep(SUM_BYTES, (project,))
        ((parts,),) = yield SqlStep(SUM_ALL_PARTS, (project,))
        _check_quota(files + parts + part.bytes, max_project_bytes, param="data")
    yield SqlStep(SAVE_PART, (project, upload_id, *part))
    return True


def _complete_upload(
    project: str, upload_id: str, file: FileRow, max_project_bytes: int | None, limits: StoreLimits
) -> Steps[bool]:
    yield from _check_project(project, file.bytes, max_project_bytes, limits)
    if not (yield SqlStep(FINISH_UPLOAD, ("completed", file.id, project, upload_id))):
        return False
    yield SqlStep(SAVE, (project, *file))
    yield SqlStep(DELETE_PARTS, (project, upload_id))
    return True


def _cancel_upload(project: str, upload_id: str) -> Steps[bool]:
    yield _lock(project)
    if not (yield SqlStep(FINISH_UPLOAD, ("cancelled", None, project, upload_id))):
        return False
    yield SqlStep(DELETE_PARTS, (project, upload_id))
    return True


def _expire_files(now: int) -> Steps[list[str]]:
    expired = yield SqlStep(EXPIRED, (now, _EXPIRY_STEP))
    for project, file_id in expired:
        yield SqlStep(DELETE_EXPIRED, (project, file_id))
        rows = yield SqlStep(ENTRIES_OF_FILE, (project, file_id))
        yield from delete_entries([position for (position,) in rows])
    return [file_id for _, file_id in expired]


def _expire_uploads(now: int) -> Steps[tuple[int, list[str]]]:
    expired = yield SqlStep(EXPIRED_UPLOADS, (now, _EXPIRY_STEP))
    parts: list[str] = []
    for key in expired:
        rows = yield SqlStep(LOAD_PARTS, key)
        parts += [row[0] for row in rows]
        yield SqlStep(DELETE_PARTS, key)
        yield SqlStep(DELETE_UPLOAD, key)
    return len(expired), parts
