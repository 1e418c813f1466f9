"""The handlers of /v1/prompts."""

from typing import Literal

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.errors import UnsupportedParameter
from antiphon.protocol import codec
from antiphon.protocol.prompt import PromptSummary
from antiphon.server.http import Exchange, read_body
from antiphon.server.query import VersionQuery, read_query


class PromptList(Struct):
    """Every version of every prompt."""

    data: list[PromptSummary]
    object: Literal["list"] = "list"


class DeletedPrompt(Struct):
    id: str
    object: Literal["prompt.deleted"] = "prompt.deleted"
    deleted: Literal[True] = True


class PromptHandlers:
    """One method for each operation on prompts."""

    def __init__(self, engine: Engine, *, max_body_bytes: int) -> None:
        self._prompts = engine.prompts
        self._max_body_bytes = max_body_bytes

    async def define(self, exchange: Exchange) -> None:
        definition, ignored = codec.decode_prompt_definition(await read_body(exchange, self._max_body_bytes))
        exchange.note_ignored(ignored)
        await exchange.answer_with(await self._prompts.define(exchange.project, definition))

    async def list_all(self, exchange: Exchange) -> None:
        await exchange.answer_with(PromptList(await self._prompts.list_all(exchange.project)))

    async def retrieve(self, exchange: Exchange) -> None:
        query = read_query(exchange, VersionQuery)
        await exchange.answer_with(await self._prompts.retrieve(exchange.project, exchange.param, query.version))

    async def delete(self, exchange: Exchange) -> None:
        if read_query(exchange, VersionQuery).version is not None:
            raise UnsupportedParameter(
                "One version cannot be deleted by itself: without 'version', all of them are deleted.",
                param="version",
            )
        await self._prompts.delete(exchange.project, exchange.param)
        await exchange.answer_with(DeletedPrompt(exchange.param))
