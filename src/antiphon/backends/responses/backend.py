"""Models behind a server that speaks Responses itself: OpenAI, Azure, vLLM, llama.cpp, or another Antiphon."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from antiphon.backends.base import EVERYTHING, Deltas, Turn, read_options
from antiphon.backends.responses.memory import Memory
from antiphon.backends.responses.options import Options
from antiphon.backends.responses.reader import ResponsesReader
from antiphon.backends.responses.request import Continuation, Writer, list_idle
from antiphon.backends.upstream.backend import UpstreamBackend
from antiphon.errors import NotFound, PreviousResponseNotFound

logger = logging.getLogger(__name__)


class ResponsesBackend(UpstreamBackend):
    """What it can do is up to its server: everything is passed on."""

    def __init__(self, name: str, options: Options) -> None:
        self._writer = Writer(name, options)
        super().__init__(name, options, headers=self._writer.credentials())
        any_model = options.models is None
        self.capabilities = msgspec.structs.replace(EVERYTHING, any_model=any_model, list_idle=list_idle)
        self._memory = Memory() if options.state == "upstream" else None

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
            logger.warning("backend %s: %s", self.upstream.name, warning)
        settle = functools.partial(self._memory.learn, turn) if self._memory is not None else None
        make_reader = functools.partial(ResponsesReader, secrets=self.upstream.secrets, settle=settle)
        return await self.upstream.stream("/responses", question.body, make_reader, headers=question.headers)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.count_upstream("/responses/input_tokens", turn, self._writer.write_count)


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ResponsesBackend:
    """What the registry calls."""
    return ResponsesBackend(name, read_options(options, Options, name=name))
