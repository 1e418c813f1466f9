"""The handlers of /v1/organization/projects: projects and their API keys, in the shapes of OpenAI's admin API."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from antiphon.config.settings import DEFAULT_PROJECT, KeyScope, Settings
from antiphon.errors import InsufficientScope, InvalidRequest, NotFound
from antiphon.protocol import codec
from antiphon.protocol.unions import Wire
from antiphon.server.http import HttpRequest
from antiphon.server.query import read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation
from antiphon.store.base import Store
from antiphon.store.keys import KEY_PREFIX, StoredKey, generate_key
from antiphon.store.usage import StoredProject

MAX_LABEL_LENGTH = 256
_MAX_LIFETIME = 36500 * 86400

Label = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_LENGTH)]


class CreateProject(Wire, kw_only=True):
    """The body of `POST /v1/organization/projects`. The name becomes the id of the project."""

    name: Label


class UpdateProject(Wire, kw_only=True):
    """The body of `POST /v1/organization/projects/{project_id}`."""

    name: Label


class CreateApiKey(Wire, kw_only=True):
    """The body of `POST /v1/organization/projects/{project_id}/api_keys`. Without scopes, a key has `inference`."""

    name: Annotated[str, Meta(max_length=MAX_LABEL_LENGTH)] = ""
    scopes: Annotated[list[KeyScope], Meta(min_length=1)] | None = None
    expires_in_seconds: Annotated[int, Meta(ge=1, le=_MAX_LIFETIME)] | None = None


class Project(Struct, kw_only=True):
    id: str
    name: str
    created_at: int
    archived_at: int | None = None
    status: Literal["active", "archived"] = "active"
    object: Literal["organization.project"] = "organization.project"


class KeyOwnerAccount(Struct):
    """The owner of a key. Each key has one of its own, because there are no users."""

    id: str
    name: str
    created_at: int
    role: str = "member"
    object: Literal["organization.project.service_account"] = "organization.project.service_account"


class KeyOwner(Struct):
    service_account: KeyOwnerAccount
    type: Literal["service_account"] = "service_account"


class ProjectApiKey(Struct, kw_only=True):
    """An API key without its value. `scopes` is an extension."""

    id: str
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    scopes: tuple[str, ...]
    owner: KeyOwner
    owner_project_access: Literal["active", "inactive"] = "active"
    object: Literal["organization.project.api_key"] = "organization.project.api_key"


class CreatedApiKey(ProjectApiKey, kw_only=True):
    """A new API key with its value, which is shown only once."""

    value: str


class DeletedApiKey(Struct):
    id: str
    object: Literal["organization.project.api_key.deleted"] = "organization.project.api_key.deleted"
    deleted: Literal[True] = True


class ProjectPage(Struct, kw_only=True):
    data: list[Project]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ApiKeyPage(Struct, kw_only=True):
    data: list[ProjectApiKey]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class KeysQuery(Struct):
    """Parameters of a list of API keys."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class ProjectsQuery(KeysQuery):
    """Parameters of a list of projects."""

    include_archived: bool = False


class _Listed(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Listed)

_decode_create = codec.make_decoder(CreateProject)
_decode_update = codec.make_decoder(UpdateProject)
_decode_known_key = codec.make_decoder(CreateApiKey)


def _decode_key(body: bytes) -> codec.Decoded[CreateApiKey]:
    """Decode the body that creates a key. An ignored field could give the key more rights, or no expiry."""
    decoded = _decode_known_key(body)
    if decoded.ignored:
        param = decoded.ignored[0]
        raise InvalidRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    return decoded


class ProjectHandlers:
    """One method per operation on projects and their keys.

    A project exists if the admin API created it, if it has a key, or if the settings name it. Its id is the name by
    which keys and data refer to it. A key that is not organization-wide sees only its own project.
    """

    operations: ClassVar[dict[str, Operation]] = {
        "list_all": Operation(
            id="listProjects", summary="List the projects.", query_type=ProjectsQuery, response_type=ProjectPage
        ),
        "create": Operation(
            id="createProject", summary="Create a project.", body_type=CreateProject, response_type=Project
        ),
        "retrieve": Operation(id="getProject", summary="Get a project.", response_type=Project),
        "update": Operation(
            id="updateProject", summary="Rename a project.", body_type=UpdateProject, response_type=Project
        ),
        "archive": Operation(
            id="archiveProject",
            summary="Archive a project and revoke its keys.",
            response_type=Project,
            errors=(InvalidRequest,),
        ),
        "list_keys": Operation(
            id="listProjectKeys",
            summary="List the API keys of a project.",
            query_type=KeysQuery,
            response_type=ApiKeyPage,
        ),
        "create_key": Operation(
            id="createProjectKey",
            summary="Create an API key. Its value is shown only once.",
            body_type=CreateApiKey,
            response_type=CreatedApiKey,
        ),
        "retrieve_key": Operation(
            id="getProjectKey", summary="Get an API key of a project.", response_type=ProjectApiKey
        ),
        "delete_key": Operation(
            id="deleteProjectKey", summary="Revoke an API key of a project.", response_type=DeletedApiKey
        ),
    }

    def __init__(self, store: Store, get_settings: Callable[[], Settings]) -> None:
        self._store = store
        self._get_settings = get_settings

    # Projects

    async def list_all(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, ProjectsQuery)
        projects = await self._list_visible(http_request)
        chosen, has_more = _take_page(
            projects, query, lambda project: query.include_archived or project.archived_at is None
        )
        shown = [_describe_project(project) for project in chosen]
        first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
        await http_request.respond_with(ProjectPage(data=shown, first_id=first_id, last_id=last_id, has_more=has_more))

    async def create(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_create, self._get_settings())
        if not _is_organization_wide(http_request):
            raise InsufficientScope("This API key administers only its own project, and cannot create others.")
        _check_label(body.name, "name")
        if any(project.id == body.name for project in await self._list_visible(http_request)):
            raise InvalidRequest(f"A project '{body.name}' exists already.", param="name", code="invalid_value")
        project = StoredProject(body.name, body.name, int(time.time()))
        await self._store.save_project(project)
        await http_request.respond_with(_describe_project(project))

    async def retrieve(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(_describe_project(await self._find(http_request)))

    async def update(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_update, self._get_settings())
        _check_label(body.name, "name")
        project = (await self._find(http_request))._replace(name=body.name)
        await self._store.save_project(project)
        await http_request.respond_with(_describe_project(project))

    async def archive(self, http_request: HttpRequest) -> None:
        project = await self._find(http_request)
        if project.id == DEFAULT_PROJECT:
            raise InvalidRequest("The default project cannot be archived.", param="project_id", code="invalid_value")
        if any(key.project == project.id for key in self._get_settings().api_keys):
            raise InvalidRequest(
                "The project has keys in the settings, which cannot be revoked here. Remove them from `api_keys`.",
                param="project_id",
                code="invalid_value",
            )
        if project.archived_at is None:
            project = project._replace(archived_at=int(time.time()))
            await self._store.archive_project(project)
        await http_request.respond_with(_describe_project(project))

    async def _list_visible(self, http_request: HttpRequest) -> list[StoredProject]:
        """Return the projects that the key of a request administers, by id."""
        projects = {project.id: project for project in await self._store.list_projects()}
        for key in await self._store.list_keys():  # the oldest first
            projects.setdefault(key.project, StoredProject(key.project, key.project, key.created_at))
        settings = self._get_settings()
        for name in (DEFAULT_PROJECT, *settings.projects, *(key.project for key in settings.api_keys)):
            projects.setdefault(name, StoredProject(name, name, 0))
        if not _is_organization_wide(http_request):
            own = projects.get(http_request.project)
            return [] if own is None else [own]
        return [project for _, project in sorted(projects.items())]

    async def _find(self, http_request: HttpRequest) -> StoredProject:
        """Return the project that the path names. A project that the key does not administer is treated as unknown."""
        project_id = http_request.path_param
        for project in await self._list_visible(http_request):
            if project.id == project_id:
                return project
        raise NotFound(f"Project with id '{project_id}' not found.", param="project_id")

    # Keys

    async def list_keys(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, KeysQuery)
        keys = await self._list_project_keys(http_request)
        chosen, has_more = _take_page(keys, query, lambda key: key.revoked_at is None)
        shown = [_describe_key(key) for key in chosen]
        first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
        await http_request.respond_with(ApiKeyPage(data=shown, first_id=first_id, last_id=last_id, has_more=has_more))

    async def create_key(self, http_request: HttpRequest) -> None:
        body = await read_json_body(http_request, _decode_key, self._get_settings())
        if body.name:
            _check_label(body.name, "name")
        project = await self._find(http_request)
        scopes = body.scopes or ["inference"]
        if "admin" in scopes and not _is_organization_wide(http_request):
            raise InsufficientScope("This API key administers only its own project, and cannot create admin keys.")
        if project.archived_at is not None:
            raise InvalidRequest("The project is archived.", param="project_id", code="invalid_value")
        now = int(time.time())
        expires_at = None if body.expires_in_seconds is None else now + body.expires_in_seconds
        key, value = generate_key(project.id, body.name, scopes, created_at=now, expires_at=expires_at)
        await self._store.save_key(key)
        if (await self._find(http_request)).archived_at is not None:  # since it was checked
            await self._store.revoke_key(key.id, now)
            raise InvalidRequest("The project is archived.", param="project_id", code="invalid_value")
        http_request.extra_headers.append((b"cache-control", b"no-store"))
        fields = msgspec.structs.asdict(_describe_key(key))
        await http_request.respond_with(CreatedApiKey(**fields, value=value))

    async def retrieve_key(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(_describe_key(await self._find_key(http_request)))

    async def delete_key(self, http_request: HttpRequest) -> None:
        key = await self._find_key(http_request)
        if not await self._store.revoke_key(key.id, int(time.time())):
            raise _make_key_error(key.id)
        await http_request.respond_with(DeletedApiKey(key.id))

    async def _list_project_keys(self, http_request: HttpRequest) -> list[StoredKey]:
        project = await self._find(http_request)
        return [key for key in await self._store.list_keys() if key.project == project.id]

    async def _find_key(self, http_request: HttpRequest) -> StoredKey:
        key_id = http_request.path_params[1]
        for key in await self._list_project_keys(http_request):
            if key.id == key_id and key.revoked_at is None:
                return key
        raise _make_key_error(key_id)


def _is_organization_wide(http_request: HttpRequest) -> bool:
    return http_request.grant is not None and http_request.grant.is_organization_wide


def _make_key_error(key_id: str) -> NotFound:
    return NotFound(f"API key with id '{key_id}' not found.", param="api_key_id")


def _check_label(text: str, param: str) -> None:
    if not text.strip() or not text.isprintable():
        raise InvalidRequest(
            f"'{param}' must be a line of 1 to {MAX_LABEL_LENGTH} printable characters.",
            param=param,
            code="invalid_value",
        )


def _take_page(rows: Sequence[T], query: KeysQuery, is_listed: Callable[[T], bool]) -> tuple[Sequence[T], bool]:
    """Return the listed rows after the cursor, up to the limit, and True if there are more.

    The cursor may be a row that is not listed any more: clients delete rows between two pages.
    """
    start = 0
    if query.after is not None:
        positions = [position for position, row in enumerate(rows) if row.id == query.after]
        if not positions:
            raise InvalidRequest(
                f"There is no element '{query.after}' in this list.", param="after", code="invalid_value"
            )
        start = positions[0] + 1
    left = [row for row in rows[start:] if is_listed(row)]
    return left[: query.limit], len(left) > query.limit


def _describe_project(project: StoredProject) -> Project:
    return Project(
        id=project.id,
        name=project.name,
        created_at=project.created_at,
        archived_at=project.archived_at,
        status="active" if project.archived_at is None else "archived",
    )


def _describe_key(key: StoredKey) -> ProjectApiKey:
    return ProjectApiKey(
        id=key.id,
        name=key.name,
        redacted_value=f"{KEY_PREFIX}***",
        created_at=key.created_at,
        last_used_at=key.last_used_at,
        expires_at=key.expires_at,
        scopes=key.scopes,
        owner=KeyOwner(KeyOwnerAccount(key.id, key.name, key.created_at)),
    )
