"""Uploads: files that arrive in parts."""

from antiphon.config.limits import FileLimits
from antiphon.engine.files.files import Files, show_file
from antiphon.engine.files.storage import FileStorage
from antiphon.engine.respond.ids import random_hex
from antiphon.errors import BodyTooLarge, InvalidRequest, NotFound
from antiphon.protocol.files import CompleteUpload, CreateUpload, Upload, UploadPart
from antiphon.store.files.content import ContentWriter
from antiphon.store.files.rows import FileRow, PartRow, UploadRow

_UPLOAD_SECONDS = 3600


class Uploads:
    """The uploads of a storage."""

    def __init__(self, storage: FileStorage, files: Files, limits: FileLimits) -> None:
        self._storage = storage
        self._files = files
        self._limits = limits

    async def create(self, project: str, body: CreateUpload) -> Upload:
        limit = self._limits.max_upload_bytes
        if body.bytes > limit:
            raise BodyTooLarge(
                f"The file is too large: this server accepts at most {limit} bytes (setting files.max_upload_bytes).",
                param="bytes",
            )
        database = await self._storage.open()
        await self._storage.check_space(body.bytes)
        now = int(self._storage.now())
        row = UploadRow(
            id=f"upload_{random_hex()}",
            created_at=now,
            expires_at=now + _UPLOAD_SECONDS,
            filename=body.filename,
            bytes=body.bytes,
            purpose=body.purpose,
            mime_type=body.mime_type,
            file_seconds=None if body.expires_after is None else body.expires_after.seconds,
            status="pending",
        )
        await database.save_upload(project, row)
        return _show(row)

    async def start_part(self, project: str, upload_id: str) -> ContentWriter:
        """Return a writer for a part. Raises InvalidRequest unless the upload is pending."""
        await self._find_pending(project, upload_id)
        await self._storage.check_space(0)
        return await self._storage.contents.start_writing()

    async def add_part(self, project: str, upload_id: str, writer: ContentWriter) -> UploadPart:
        """Store the written content as a part of an upload."""
        database = await self._storage.open()
        part = PartRow(f"part_{random_hex()}", int(self._storage.now()), writer.size)
        await writer.commit(part.id)
        is_saved = False
        try:
            is_saved = await database.save_part(
                project,
                upload_id,
                part,
                max_upload_bytes=self._limits.max_upload_bytes,
                max_project_bytes=self._limits.max_project_bytes,
            )
        finally:
            if not is_saved:
                await self._storage.contents.delete([part.id])
        if not is_saved:
            await self._find_pending(project, upload_id)
        return UploadPart(id=part.id, created_at=part.created_at, upload_id=upload_id)

    async def complete(self, project: str, upload_id: str, body: CompleteUpload) -> Upload:
        """Join the parts to a file. Raises InvalidRequest if they do not have the announced size or checksum."""
        upload = await self._find_pending(project, upload_id)
        database = await self._storage.open()
        parts = {part.id: part for part in await database.load_parts(project, upload_id)}
        chosen = _choose_parts(parts, body.part_ids, upload)
        row = self._files.make_row(upload.filename, upload.bytes, upload.purpose, upload.file_seconds)
        _, digest = await self._storage.contents.join([part.id for part in chosen], row.id)
        is_saved = False
        try:
            if body.md5 is not None and body.md5.lower() != digest:
                raise InvalidRequest(
                    f"The MD5 of the parts is {digest}, not {body.md5}.", param="md5", code="invalid_value"
                )
            is_saved = await database.complete_upload(
                project, upload_id, row, max_project_bytes=self._limits.max_project_bytes
            )
        finally:
            if not is_saved:
                await self._storage.contents.delete([row.id])
        if not is_saved:
            await self._find_pending(project, upload_id)
        await self._storage.contents.delete(list(parts))
        return _show(upload._replace(status="completed"), row)

    async def cancel(self, project: str, upload_id: str) -> Upload:
        upload = await self._find_pending(project, upload_id)
        database = await self._storage.open()
        parts = await database.load_parts(project, upload_id)
        if not await database.cancel_upload(project, upload_id):
            await self._find_pending(project, upload_id)
        await self._storage.contents.delete([part.id for part in parts])
        return _show(upload._replace(status="cancelled"))

    async def _find_pending(self, project: str, upload_id: str) -> UploadRow:
        database = await self._storage.open()
        upload = await database.load_upload(project, upload_id)
        if upload is None:
            raise NotFound(f"No such Upload object: {upload_id}", param="upload_id")
        status = upload.status
        if status == "pending" and upload.expires_at <= self._storage.now():
            status = "expired"
        if status != "pending":
            raise InvalidRequest(
                f"The upload '{upload_id}' is {status}. Only a pending upload can be changed.",
                param="upload_id",
                code="invalid_value",
            )
        return upload


def _choose_parts(parts: dict[str, PartRow], part_ids: list[str], upload: UploadRow) -> list[PartRow]:
    """Return the parts of a file in their order. Raises InvalidRequest if one is unknown or repeated."""
    seen: set[str] = set()
    for index, part_id in enumerate(part_ids):
        if part_id not in parts or part_id in seen:
            problem = "is given twice" if part_id in seen else "is not a part of this upload"
            raise InvalidRequest(f"'{part_id}' {problem}.", param=f"part_ids[{index}]", code="invalid_value")
        seen.add(part_id)
    chosen = [parts[part_id] for part_id in part_ids]
    size = sum(part.bytes for part in chosen)
    if size != upload.bytes:
        raise InvalidRequest(
            f"The parts have {size} bytes together, but the upload was created with {upload.bytes}.",
            param="part_ids",
            code="invalid_value",
        )
    return chosen


def _show(row: UploadRow, file: FileRow | None = None) -> Upload:
    return Upload(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created_at,
        filename=row.filename,
        purpose=row.purpose,
        status=row.status,
        expires_at=row.expires_at,
        file=None if file is None else show_file(file),
    )
