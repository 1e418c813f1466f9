"""The handlers of /v1/containers."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from antiphon.config.settings import Settings
from antiphon.engine.containers.containers import ContainerFilePage, ContainerPage, Containers
from antiphon.errors import InvalidRequest, MissingParameter, NotFound, RateLimited
from antiphon.protocol import codec
from antiphon.protocol.containers import Container, ContainerFile, CreateContainer, CreateContainerFile
from antiphon.server.files import PartForm
from antiphon.server.http import HttpRequest
from antiphon.server.multipart import read_form
from antiphon.server.query import read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation

_decode_container = codec.make_decoder(CreateContainer)
_decode_file = codec.make_decoder(CreateContainerFile)


class DeletedContainer(Struct):
    id: str
    object: Literal["container.deleted"] = "container.deleted"
    deleted: Literal[True] = True


class DeletedContainerFile(Struct):
    id: str
    object: Literal["container.file.deleted"] = "container.file.deleted"
    deleted: Literal[True] = True


class ContainerFilesQuery(Struct):
    """Parameters of a list of the files of a container."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ContainersQuery(ContainerFilesQuery):
    """Parameters of a list of containers. `name` selects those with this name."""

    name: str | None = None


class ContainerHandlers:
    """One method per operation on containers and their files."""

    operations: ClassVar[dict[str, Operation]] = {
        "create": Operation(
            id="createContainer",
            summary="Create a container of the code interpreter.",
            body_type=CreateContainer,
            response_type=Container,
            errors=(NotFound, RateLimited),
        ),
        "list_all": Operation(
            id="listContainers",
            summary="List the containers.",
            query_type=ContainersQuery,
            response_type=ContainerPage,
        ),
        "retrieve": Operation(id="getContainer", summary="Get a container.", response_type=Container),
        "delete": Operation(
            id="deleteContainer", summary="Delete a container and its files.", response_type=DeletedContainer
        ),
        "add_file": Operation(
            id="addContainerFile",
            summary="Add a file to a container: a form with the file, or JSON with the id of a file.",
            body_type=PartForm,
            file_field="file",
            response_type=ContainerFile,
        ),
        "list_files": Operation(
            id="listContainerFiles",
            summary="List the files of a container.",
            query_type=ContainerFilesQuery,
            response_type=ContainerFilePage,
        ),
        "retrieve_file": Operation(
            id="getContainerFile",
            summary="Get a file of a container.",
            response_type=ContainerFile,
            errors=(InvalidRequest,),
        ),
        "download": Operation(
            id="getContainerFileContent",
            summary="Get the content of a file of a container.",
            returns_file=True,
            errors=(InvalidRequest,),
        ),
        "delete_file": Operation(
            id="deleteContainerFile",
            summary="Delete a file of a container.",
            response_type=DeletedContainerFile,
            errors=(InvalidRequest,),
        ),
    }

    def __init__(self, containers: Containers, settings: Settings) -> None:
        self._containers = containers
        self._settings = settings

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_container, self._settings)
        await http_request.respond_with(await self._containers.create(http_request.project, body))

    async def list_all(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ContainersQuery)
        page = await self._containers.list_all(
            http_request.project, after=query.after, limit=query.limit, order=query.order, name=query.name
        )
        await http_request.respond_with(page)

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(await self._containers.retrieve(http_request.project, http_request.path_param))

    async def delete(self, http_request: HttpRequest) -> None:
        await self._containers.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedContainer(http_request.path_param))

    async def add_file(self, http_request: HttpRequest) -> None:
        project, container_id = http_request.project, http_request.path_param
        if not http_request.headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
            body = await read_json_body(http_request, _decode_file, self._settings)
            await http_request.respond_with(await self._containers.copy_file(project, container_id, body.file_id))
            return
        form = await read_form(
            http_request,
            file_field="file",
            start_writing=lambda: self._containers.start_upload(project, container_id),
            max_bytes=self._settings.code_interpreter.container_bytes,
            setting="code_interpreter.container_bytes",
        )
        http_request.warn_ignored(tuple(name[:100] for name in form.fields))
        try:
            if not form.filename:
                raise MissingParameter("The file has no name: send a 'filename' in its part of the form.", param="file")
            file = await self._containers.add_file(project, container_id, form.filename, form.writer)
        except BaseException:
            form.writer.discard()
            raise
        await http_request.respond_with(file)

    async def list_files(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ContainerFilesQuery)
        page = await self._containers.list_files(
            http_request.project, http_request.path_param, after=query.after, limit=query.limit, order=query.order
        )
        await http_request.respond_with(page)

    async def retrieve_file(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(
            await self._containers.retrieve_file(http_request.project, *http_request.path_params)
        )

    async def download(self, http_request: HttpRequest) -> None:
        file, parts = await self._containers.open_file(http_request.project, *http_request.path_params)
        await http_request.respond_file(file.bytes, parts, filename=file.path.rpartition("/")[2])

    async def delete_file(self, http_request: HttpRequest) -> None:
        await self._containers.delete_file(http_request.project, *http_request.path_params)
        await http_request.respond_with(DeletedContainerFile(http_request.path_params[1]))
