"""The handlers of /v1/files and /v1/uploads."""

from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError

from antiphon.config.settings import Settings
from antiphon.engine.files.service import FileService
from antiphon.errors import MissingParameter
from antiphon.protocol import codec, validation
from antiphon.protocol.files import CompleteUpload, CreateUpload, File, FileForm, Upload, UploadPart
from antiphon.protocol.unions import Wire
from antiphon.server.http import HttpRequest
from antiphon.server.multipart import nest_fields, read_form
from antiphon.server.query import read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation

T = TypeVar("T")


class FileQuery(Struct):
    """Parameters of the list of files."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FileList(Struct):
    """A page of files."""

    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class PartForm(Wire):
    """The form of a part of an upload. It has no fields besides the file."""


_decode_create = codec.make_decoder(CreateUpload)
_decode_complete = codec.make_decoder(CompleteUpload)


class FileHandlers:
    """One method per operation on files."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": Operation(
            id="createFile", summary="Upload a file.", body_type=FileForm, file_field="file", response_type=File
        ),
        "list_all": Operation(id="listFiles", summary="List the files.", query_type=FileQuery, response_type=FileList),
        "retrieve": Operation(id="getFile", summary="Get a file.", response_type=File),
        "delete": Operation(
            id="deleteFile",
            summary="Delete a file, and remove it from all vector stores.",
            response_type=DeletedFile,
        ),
        "download": Operation(id="getFileContent", summary="Get the content of a file.", returns_file=True),
    }

    def __init__(self, service: FileService, settings: Settings) -> None:
        self._files = service.files
        self._limits = settings.files

    async def create(self, http_request: HttpRequest) -> None:
        form = await read_form(
            http_request,
            file_field="file",
            start_writing=self._files.start_upload,
            max_bytes=self._limits.max_file_bytes,
            setting="files.max_file_bytes",
        )
        try:
            options = _read_fields(http_request, form.fields)
            if not form.filename:
                raise MissingParameter("The file has no name: send a 'filename' in its part of the form.", param="file")
            file = await self._files.create(http_request.project, form.writer, form.filename, options)
        except BaseException:
            form.writer.discard()
            raise
        await http_request.respond_with(file)

    async def list_all(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, FileQuery)
        files, has_more = await self._files.list_page(
            http_request.project, purpose=query.purpose, after=query.after, limit=query.limit, order=query.order
        )
        first, last = (files[0].id, files[-1].id) if files else (None, None)
        await http_request.respond_with(FileList(files, has_more, first, last))

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._files.retrieve(http_request.project, http_request.path_param))

    async def delete(self, http_request: HttpRequest) -> None:
        await self._files.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedFile(http_request.path_param))

    async def download(self, http_request: HttpRequest) -> None:
        file, parts = await self._files.open_content(http_request.project, http_request.path_param)
        await http_request.respond_file(file.bytes, parts, filename=file.filename)


def _read_fields(http_request: HttpRequest, fields: dict[str, str]) -> FileForm:
    nested = nest_fields(fields)
    known = FileForm.__struct_fields__
    http_request.warn_ignored(tuple(name[:100] for name in nested if name not in known))
    given = {name: nested[name] for name in known if name in nested}
    try:
        return msgspec.convert(given, FileForm, strict=False)
    except ValidationError as error:
        raise validation.explain_error(error, FileForm, msgspec.json.encode(given)).to_invalid_request() from None


class UploadHandlers:
    """One method per operation on uploads."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": Operation(
            id="createUpload",
            summary="Begin a file that is uploaded in parts.",
            body_type=CreateUpload,
            response_type=Upload,
        ),
        "add_part": Operation(
            id="addUploadPart",
            summary="Upload a part of a file.",
            body_type=PartForm,
            file_field="data",
            response_type=UploadPart,
        ),
        "complete": Operation(
            id="completeUpload",
            summary="Join the parts of an upload to a file.",
            body_type=CompleteUpload,
            response_type=Upload,
        ),
        "cancel": Operation(id="cancelUpload", summary="Cancel an upload.", response_type=Upload),
    }

    def __init__(self, service: FileService, settings: Settings) -> None:
        self._uploads = service.uploads
        self._limits = settings.files
        self._settings = settings

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_create, self._settings)
        await http_request.respond_with(await self._uploads.create(http_request.project, body))

    async def add_part(self, http_request: HttpRequest) -> None:
        upload_id = http_request.path_param
        form = await read_form(
            http_request,
            file_field="data",
            start_writing=lambda: self._uploads.start_part(http_request.project, upload_id),
            max_bytes=self._limits.max_part_bytes,
            setting="files.max_part_bytes",
        )
        http_request.warn_ignored(tuple(name[:100] for name in form.fields))
        try:
            part = await self._uploads.add_part(http_request.project, upload_id, form.writer)
        except BaseException:
            form.writer.discard()
            raise
        await http_request.respond_with(part)

    async def complete(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_complete, self._settings)
        upload = await self._uploads.complete(http_request.project, http_request.path_param, body)
        await http_request.respond_with(upload)

    async def cancel(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._uploads.cancel(http_request.project, http_request.path_param))
