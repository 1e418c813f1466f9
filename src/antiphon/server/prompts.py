"""The handlers of /v1/prompts."""

from typing import ClassVar, Literal

from msgspec import Struct

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.errors import UnsupportedParameter
from antiphon.protocol import codec
from antiphon.protocol.prompt import Prompt, PromptDefinition, PromptSummary
from antiphon.server.http import HttpRequest
from antiphon.server.query import VersionQuery, read_query
from antiphon.server.request_body import read_json_body
from antiphon.server.router import Operation


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

    operations: ClassVar[dict[str, Operation]] = {
        "define": Operation(
            id="definePrompt", summary="Define a version of a prompt.", body_type=PromptDefinition, response_type=Prompt
        ),
        "list_all": Operation(id="listPrompts", summary="List the versions of all prompts.", response_type=PromptList),
        "retrieve": Operation(
            id="getPrompt",
            summary="Get a version of a prompt, by default the newest.",
            query_type=VersionQuery,
            response_type=Prompt,
        ),
        "delete": Operation(
            id="deletePrompt", summary="Delete a prompt with all its versions.", response_type=DeletedPrompt
        ),
    }

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._prompts = engine.prompts
        self._settings = settings

    async def define(self, http_request: HttpRequest) -> None:
        definition = await read_json_body(http_request, codec.decode_prompt_definition, self._settings)
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
