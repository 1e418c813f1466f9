"""The handlers of /v1/vector_stores."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from antiphon.config.settings import Settings
from antiphon.engine.files.service import FileService
from antiphon.errors import NotFound
from antiphon.protocol import codec
from antiphon.protocol.vector_stores import (
    AttachFile,
    CreateFileBatch,
    CreateVectorStore,
    FileBatch,
    FileContentPage,
    FileStatus,
    SearchPage,
    SearchVectorStore,
    UpdateStoreFile,
    UpdateVectorStore,
    VectorStore,
    VectorStoreFile,
)
from antiphon.server.http import HttpRequest
from antiphon.server.query import read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation

# Time until a client polls a file in progress again: shorter for a file that was added just now.
_POLL_HEADER = b"openai-poll-after-ms"
_SHORT_POLL_MS = 100
_LONG_POLL_MS = 500
_SHORT_POLL_SECONDS = 5


class StoreQuery(Struct):
    """Parameters of the list of vector stores."""

    after: str | None = None
    before: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class StoreFileQuery(StoreQuery):
    """Parameters of the list of files of a vector store or a batch."""

    filter: FileStatus | None = None


class VectorStoreList(Struct):
    """A page of vector stores."""

    data: list[VectorStore]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class VectorStoreFileList(Struct):
    """A page of the files of a vector store."""

    data: list[VectorStoreFile]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedVectorStore(Struct):
    id: str
    object: Literal["vector_store.deleted"] = "vector_store.deleted"
    deleted: Literal[True] = True


class DeletedVectorStoreFile(Struct):
    id: str
    object: Literal["vector_store.file.deleted"] = "vector_store.file.deleted"
    deleted: Literal[True] = True


_decode_create_vector_store = codec.make_decoder(CreateVectorStore)
_decode_update_vector_store = codec.make_decoder(UpdateVectorStore)
_decode_search_vector_store = codec.make_decoder(SearchVectorStore)
_decode_attach_file = codec.make_decoder(AttachFile)
_decode_update_store_file = codec.make_decoder(UpdateStoreFile)
_decode_create_file_batch = codec.make_decoder(CreateFileBatch)


def _operation(
    operation_id: str, summary: str, response: Any, body: Any = None, *, query: type[Struct] | None = None
) -> Operation:
    return Operation(
        id=operation_id,
        summary=summary,
        response_type=response,
        body_type=body,
        query_type=query,
        errors=() if body is None else (NotFound,),
    )


class VectorStoreHandlers:
    """One method per operation on vector stores, their files and their batches."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": _operation("createVectorStore", "Create a vector store.", VectorStore, CreateVectorStore),
        "list_all": _operation("listVectorStores", "List the vector stores.", VectorStoreList, query=StoreQuery),
        "retrieve": _operation("getVectorStore", "Get a vector store.", VectorStore),
        "update": _operation("updateVectorStore", "Change a vector store.", VectorStore, UpdateVectorStore),
        "delete": _operation("deleteVectorStore", "Delete a vector store. Its files stay.", DeletedVectorStore),
        "search": _operation("searchVectorStore", "Search a vector store.", SearchPage, SearchVectorStore),
        "attach": _operation("attachFile", "Add a file to a vector store.", VectorStoreFile, AttachFile),
        "list_files": _operation(
            "listVectorStoreFiles", "List the files of a vector store.", VectorStoreFileList, query=StoreFileQuery
        ),
        "retrieve_file": _operation("getVectorStoreFile", "Get a file of a vector store.", VectorStoreFile),
        "update_file": _operation(
            "updateVectorStoreFile", "Replace the attributes of a file.", VectorStoreFile, UpdateStoreFile
        ),
        "detach": _operation(
            "detachFile", "Remove a file from a vector store. The file itself stays.", DeletedVectorStoreFile
        ),
        "load_content": _operation("getVectorStoreFileContent", "Get the text of an indexed file.", FileContentPage),
        "create_batch": _operation(
            "createFileBatch", "Add several files to a vector store.", FileBatch, CreateFileBatch
        ),
        "retrieve_batch": _operation("getFileBatch", "Get a batch of files.", FileBatch),
        "cancel_batch": _operation("cancelFileBatch", "Cancel the files of a batch in progress.", FileBatch),
        "list_batch_files": _operation(
            "listFileBatchFiles", "List the files of a batch.", VectorStoreFileList, query=StoreFileQuery
        ),
    }

    def __init__(self, service: FileService, settings: Settings) -> None:
        self._stores = service.vector_stores
        self._now = service.now
        self._settings = settings

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_create_vector_store, self._settings)
        await http_request.respond_with(await self._stores.create(http_request.project, body))

    async def list_all(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, StoreQuery)
        stores, has_more = await self._stores.list_page(
            http_request.project, after=query.after, before=query.before, limit=query.limit, order=query.order
        )
        first, last = (stores[0].id, stores[-1].id) if stores else (None, None)
        await http_request.respond_with(VectorStoreList(stores, has_more, first, last))

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._stores.retrieve(http_request.project, http_request.path_param))

    async def update(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_update_vector_store, self._settings)
        await http_request.respond_with(await self._stores.update(http_request.project, http_request.path_param, body))

    async def delete(self, http_request: HttpRequest) -> None:
        await self._stores.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedVectorStore(http_request.path_param))

    async def search(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_search_vector_store, self._settings)
        if body.rewrite_query:
            http_request.warnings.append("rewrite_query: queries are not rewritten here")
        await http_request.respond_with(await self._stores.search(http_request.project, http_request.path_param, body))

    async def attach(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_attach_file, self._settings)
        file = await self._stores.attach(http_request.project, http_request.path_param, body)
        self._add_poll_header(http_request, file.created_at, is_in_progress=file.status == "in_progress")
        await http_request.respond_with(file)

    async def list_files(self, http_request: HttpRequest) -> None:
        await self._list_files(http_request, http_request.path_param, None)

    async def list_batch_files(self, http_request: HttpRequest) -> None:
        await self._list_files(http_request, *http_request.path_params)

    async def _list_files(self, http_request: HttpRequest, store_id: str, batch_id: str | None) -> None:
        query = read_query(http_request, StoreFileQuery)
        files, has_more = await self._stores.list_files(
            http_request.project,
            store_id,
            batch_id=batch_id,
            status=query.filter,
            after=query.after,
            before=query.before,
            limit=query.limit,
            order=query.order,
        )
        first, last = (files[0].id, files[-1].id) if files else (None, None)
        await http_request.respond_with(VectorStoreFileList(files, has_more, first, last))

    async def retrieve_file(self, http_request: HttpRequest) -> None:
        file = await self._stores.retrieve_file(http_request.project, *http_request.path_params)
        self._add_poll_header(http_request, file.created_at, is_in_progress=file.status == "in_progress")
        await http_request.respond_with(file)

    async def update_file(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_update_store_file, self._settings)
        store_id, file_id = http_request.path_params
        await http_request.respond_with(
            await self._stores.update_file(http_request.project, store_id, file_id, body.attributes)
        )

    async def detach(self, http_request: HttpRequest) -> None:
        store_id, file_id = http_request.path_params
        await self._stores.detach(http_request.project, store_id, file_id)
        await http_request.respond_with(DeletedVectorStoreFile(file_id))

    async def load_content(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(
            await self._stores.load_content(http_request.project, *http_request.path_params)
        )

    async def create_batch(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_create_file_batch, self._settings)
        batch = await self._stores.create_batch(http_request.project, http_request.path_param, body)
        self._add_poll_header(http_request, batch.created_at, is_in_progress=batch.file_counts.in_progress > 0)
        await http_request.respond_with(batch)

    async def retrieve_batch(self, http_request: HttpRequest) -> None:
        batch = await self._stores.retrieve_batch(http_request.project, *http_request.path_params)
        self._add_poll_header(http_request, batch.created_at, is_in_progress=batch.file_counts.in_progress > 0)
        await http_request.respond_with(batch)

    async def cancel_batch(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(
            await self._stores.cancel_batch(http_request.project, *http_request.path_params)
        )

    def _add_poll_header(self, http_request: HttpRequest, created_at: int, *, is_in_progress: bool) -> None:
        if is_in_progress:
            is_new = self._now() - created_at < _SHORT_POLL_SECONDS
            wait = _SHORT_POLL_MS if is_new else _LONG_POLL_MS
            http_request.extra_headers.append((_POLL_HEADER, b"%d" % wait))
