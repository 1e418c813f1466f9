"""Files and uploads, and the request bodies of their endpoints."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from antiphon.protocol.unions import Wire, always

Purpose: TypeAlias = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
UploadStatus: TypeAlias = Literal["pending", "completed", "cancelled", "expired"]
Filename: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]

MAX_UPLOAD_BYTES = 8 * 1024**3


class FileExpiry(Wire):
    """The expiry of a file, in seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class FileForm(Wire):
    """The fields of the form of `POST /v1/files`, without the file itself."""

    purpose: Purpose
    expires_after: FileExpiry | None = None


class File(Wire, kw_only=True):
    """A stored file. `status` is deprecated in the API, but required."""

    id: str
    object: Literal["file"] = always("file")
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = always("processed")
    expires_at: int | None = always(None)
    status_details: str | None = always(None)


class CreateUpload(Wire, kw_only=True):
    """The body of `POST /v1/uploads`. `bytes` is the size of the whole file."""

    bytes: Annotated[int, Meta(ge=0, le=MAX_UPLOAD_BYTES)]
    filename: Filename
    mime_type: Annotated[str, Meta(max_length=255)]
    purpose: Purpose
    expires_after: FileExpiry | None = None


class CompleteUpload(Wire, kw_only=True):
    """The body of `POST /v1/uploads/{id}/complete`. The order of the ids is the order of the parts in the file."""

    part_ids: list[str]
    md5: str | None = None


class Upload(Wire, kw_only=True):
    """A file that is uploaded in parts."""

    id: str
    object: Literal["upload"] = always("upload")
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: UploadStatus
    expires_at: int
    file: File | None = always(None)


class UploadPart(Wire, kw_only=True):
    id: str
    object: Literal["upload.part"] = always("upload.part")
    created_at: int
    upload_id: str
