"""The handlers of /v1/prompts."""

from typing import Literal

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.errors import UnsupportedParameter
from antiphon.protocol import codec
from antiphon.protocol.prompt import PromptSummary
from antiphon.server.http import HttpRequest, read_body
from antiphon.server.query import VersionQuery, read_query
from antiphon.server.request_body import decode_body


class PromptList(Struct):
    """All versions of all prompts."""

    data: list[PromptSummary]
    object: Literal["list"] = "list"


class DeletedPrompt(Struct):
    id: str
    object: Literal["prompt.deleted"] = "prompt.deleted"
    deleted: Literal[True] = True


class PromptHandlers:
    """One method per operation on prompts."""

    def __init__(self, engine: Engine, *, max_body_bytes: int, max_body_values: int) -> None:
        self._prompts = engine.prompts
        self._max_body_bytes = max_body_bytes
        self._max_body_values = max_body_values

    async def define(self, http_request: HttpRequest) -> None:
        body = await read_body(http_request, self._max_body_bytes)
        definition, ignored = await decode_body(codec.decode_prompt_definition, body, max_values=self._max_body_values)
        http_request.warn_ignored(ignored)
        await http_request.respond_with(await self._prompts.define(http_request.project, definition))

    async def list_all(self, http_request: HttpRequest) -> None:
        await http_request.respond_with(PromptList(await self._prompts.list_all(http_request.project)))

    async def retrieve(self, http_request: HttpRequest) -> None:
        query = read_query(http_request, VersionQuery)
        await http_request.respond_with(
            await self._prompts.retrieve(http_request.project, http_request.path_param, query.version)
        )

    async def delete(self, http_request: HttpRequest) -> None:
        if read_query(http_request, VersionQuery).version is not None:
            raise UnsupportedParameter(
                "A single version cannot be deleted: send no 'version' to delete all of them.",
                param="version",
            )
        await self._prompts.delete(http_request.project, http_request.path_param)
        await http_request.respond_with(DeletedPrompt(http_request.path_param))
