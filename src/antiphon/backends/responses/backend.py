"""Models behind a server that speaks Responses itself: OpenAI, Azure, vLLM, llama.cpp, or another Antiphon."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from antiphon.backends.base import ALL_CAPABILITIES, Turn, read_options
from antiphon.backends.responses.reader import ResponsesReader
from antiphon.backends.responses.request import Continuation, Options, Writer, list_ignored
from antiphon.backends.responses.unsupported_fields import Fault, Refusals, Sent, find_fault
from antiphon.backends.responses.upstream_state import Memory
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas
from antiphon.upstream.fields import ServedModel

_FAULTS: dict[Fault, str] = {
    "reasoning": "the model does not take 'reasoning'",
    "reasoning.summary": "the model does not take 'reasoning.summary'",
    "include": "the model has no encrypted reasoning",
    "items": "the model takes no earlier reasoning",
    "seals": "earlier reasoning cannot be decrypted there any more",
}

logger = logging.getLogger(__name__)


class ResponsesBackend(UpstreamBackend):
    """What it can do is up to its server: everything is passed on."""

    def __init__(self, name: str, options: Options) -> None:
        self._writer = Writer(name, options)
        super().__init__(name, options, headers=self._writer.credentials())
        any_model = options.models is None
        self._refusals = Refusals()
        self.capabilities = msgspec.structs.replace(
            ALL_CAPABILITIES, any_model=any_model, list_ignored=self._list_ignored
        )
        self._memory = Memory() if options.state == "upstream" else None

    async def stream(self, turn: Turn) -> Deltas:
        sent = self._refusals.strip(turn)
        continuation = self._find_continuation(sent)
        known: set[Fault] = set()
        while True:
            try:
                return await self._ask(sent, continuation)
            except InvalidRequest as error:
                if self._is_lost(error, continuation):
                    continuation = None
                    continue
                fault = self._refusals.learn(error, sent)
                if fault is None or fault in known:
                    raise
                known.add(fault)
                logger.warning("backend %s: %s: asking again without it", self.upstream.name, _FAULTS[fault])
            sent = self._refusals.strip(turn)
            continuation = self._find_continuation(sent) if continuation is not None else None

    def _find_continuation(self, sent: Sent) -> Continuation | None:
        return self._memory.find(sent.turn) if self._memory is not None else None

    def _is_lost(self, error: InvalidRequest, continuation: Continuation | None) -> bool:
        """Whether the upstream cannot go on from what it has kept: that is forgotten then, and all is sent."""
        if self._memory is None or continuation is None:
            return False
        lost = isinstance(error, NotFound | PreviousResponseNotFound) or find_fault(error) == "seals"
        if lost:
            self._memory.forget(continuation)
        return lost

    async def _ask(self, sent: Sent, continuation: Continuation | None) -> Deltas:
        question = self._writer.write(sent.turn, continuation, wants_seals=sent.wants_seals)
        for warning in question.warnings:
            logger.warning("backend %s: %s", self.upstream.name, warning)
        settle = functools.partial(self._memory.learn, sent.turn) if self._memory is not None else None

        def make_reader() -> ResponsesReader:
            served_model = ServedModel(self.upstream.name, sent.model or "")
            return ResponsesReader(secrets=self.upstream.secrets, settle=settle, served_model=served_model)

        return await self.upstream.stream("/responses", question.body, make_reader, headers=question.headers)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.count_upstream("/responses/input_tokens", turn, self._write_count)

    def _write_count(self, turn: Turn) -> bytes:
        return self._writer.write_count(self._refusals.strip(turn).turn)

    def _list_ignored(self, request: CreateRequest, model: str) -> list[str]:
        return [*list_ignored(request, model), *self._refusals.list_ignored(request, model)]


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ResponsesBackend:
    """What the registry calls."""
    return ResponsesBackend(name, read_options(options, Options, name=name))
