"""Models behind a server that speaks Responses itself: OpenAI, Azure, vLLM, llama.cpp, or another Antiphon."""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from antiphon.backends.base import EVERYTHING, Deltas, Model, Turn, read_options
from antiphon.backends.responses.memory import Memory
from antiphon.backends.responses.options import Options
from antiphon.backends.responses.reader import ResponsesReader
from antiphon.backends.responses.request import Continuation, Writer
from antiphon.backends.upstream.client import Upstream
from antiphon.backends.upstream.estimate import estimate_tokens
from antiphon.backends.upstream.models import Catalogue
from antiphon.errors import AntiphonError, NotFound, PreviousResponseNotFound, UpstreamError

logger = logging.getLogger(__name__)


class ResponsesBackend:
    """What it can do is up to its server: everything is passed on."""

    def __init__(self, name: str, options: Options) -> None:
        self.capabilities = msgspec.structs.replace(EVERYTHING, any_model=options.models is None)
        self._name = name
        self._writer = Writer(name, options)
        self._upstream = Upstream(name, options, headers=self._writer.credentials())
        self._catalogue = Catalogue(self._upstream, owned_by=name)
        self._memory = Memory() if options.state == "upstream" else None
        self._counts = True

    async def start(self) -> None:
        await self._upstream.start()
        await self._catalogue.start()

    async def close(self) -> None:
        await self._catalogue.close()
        await self._upstream.close()

    def models(self) -> Sequence[Model]:
        return self._catalogue.models()

    async def stream(self, turn: Turn) -> Deltas:
        if self._memory is None:
            return await self._ask(turn, None)
        continuation = self._memory.find(turn)
        try:
            return await self._ask(turn, continuation)
        except (NotFound, PreviousResponseNotFound):
            if continuation is None:
                raise
        self._memory.forget(continuation)
        return await self._ask(turn, None)

    async def _ask(self, turn: Turn, continuation: Continuation | None) -> Deltas:
        question = self._writer.write(turn, continuation)
        for warning in question.warnings:
            logger.warning("backend %s: %s", self._name, warning)
        settle = functools.partial(self._memory.learn, turn) if self._memory is not None else None
        make_reader = functools.partial(ResponsesReader, secrets=self._upstream.secrets, settle=settle)
        return await self._upstream.stream("/responses", question.body, make_reader, headers=question.headers)

    async def count_tokens(self, turn: Turn) -> int:
        """As the upstream counts; most servers do not, and are not asked twice."""
        if self._counts:
            try:
                body = await self._upstream.post_json("/responses/input_tokens", self._writer.write_count(turn))
                return msgspec.json.decode(body, type=Counted).input_tokens
            except (NotFound, UpstreamError, msgspec.DecodeError) as error:
                self._counts = not _lacks_counting(error)
            except AntiphonError:
                pass  # it will say the same of the turn itself
        return estimate_tokens(turn)


class Counted(msgspec.Struct):
    input_tokens: int


def _lacks_counting(error: Exception) -> bool:
    return not isinstance(error, UpstreamError) or error.code == "upstream_refused"


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ResponsesBackend:
    """What the registry calls."""
    return ResponsesBackend(name, read_options(options, Options, name=name))
