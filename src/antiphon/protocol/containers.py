"""Containers of the code interpreter and their files, and the request bodies of their endpoints."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Wire, always

MAX_FILE_IDS = 50
MAX_IDLE_MINUTES = 1440

MemoryLimit: TypeAlias = Literal["1g", "4g", "16g", "64g"]
FileIds: TypeAlias = Annotated[list[str], Meta(max_length=MAX_FILE_IDS)]


class ContainerExpiry(Wire):
    """The time after the last activity at which a container expires."""

    minutes: Annotated[int, Meta(ge=1, le=MAX_IDLE_MINUTES)]
    anchor: Literal["last_active_at"] = always("last_active_at")


class NetworkPolicy(Wire):
    type: Literal["disabled", "allowlist"]
    allowed_domains: list[str] | None = None
    domain_secrets: list[JsonObject] | None = None


class CreateContainer(Wire, kw_only=True):
    """The body of `POST /v1/containers`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    expires_after: ContainerExpiry | None = None
    file_ids: FileIds | None = None
    memory_limit: MemoryLimit | None = None
    network_policy: NetworkPolicy | None = None
    skills: list[JsonObject] | None = None


class AutoContainer(Wire, kw_only=True):
    """The container of a `code_interpreter` tool that the server chooses."""

    type: Literal["auto"]
    file_ids: FileIds | None = None
    memory_limit: MemoryLimit | None = None
    network_policy: NetworkPolicy | None = None


class Container(Wire, kw_only=True):
    id: str
    created_at: int
    name: str
    status: Literal["running", "expired"]
    last_active_at: int
    expires_after: ContainerExpiry
    memory_limit: str
    network_policy: NetworkPolicy = always(NetworkPolicy("disabled"))
    object: Literal["container"] = always("container")


class CreateContainerFile(Wire, kw_only=True):
    """The JSON body of `POST /v1/containers/{id}/files`. A form has the file itself instead."""

    file_id: str


class ContainerFile(Wire, kw_only=True):
    id: str
    bytes: int
    container_id: str
    created_at: int
    path: str
    source: Literal["user", "assistant"]
    object: Literal["container.file"] = always("container.file")
