"""The backend for servers with a Responses API: OpenAI, Azure, vLLM, llama.cpp, or another Antiphon."""

import functools
import logging
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from antiphon import offload
from antiphon.backends.base import ALL_CAPABILITIES, Turn, read_options
from antiphon.backends.responses.reader import ResponsesReader
from antiphon.backends.responses.request import PreviousResponse, RequestWriter, ResponsesOptions, list_ignored_params
from antiphon.backends.responses.unsupported_fields import (
    RejectedField,
    StrippedTurn,
    UnsupportedFields,
    find_rejected_field,
)
from antiphon.backends.responses.upstream_state import UpstreamState, hash_prefixes
from antiphon.backends.responses.wire import read_item
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Deltas
from antiphon.upstream.fields import ServedModel
from antiphon.upstream.usage import estimate_output_usage

_REJECTIONS: dict[RejectedField, str] = {
    "reasoning": "the model does not support 'reasoning'",
    "reasoning.summary": "the model does not support 'reasoning.summary'",
    "include": "the model does not support encrypted reasoning",
    "reasoning_items": "the model does not accept earlier reasoning items",
    "encrypted_content": "the upstream cannot decrypt earlier reasoning",
}

logger = logging.getLogger(__name__)


class ResponsesBackend(UpstreamBackend):
    """One upstream with all of its models. Its capabilities are unknown, so everything is forwarded."""

    def __init__(self, name: str, options: ResponsesOptions) -> None:
        self._writer = RequestWriter(name, options)
        super().__init__(name, options, headers=self._writer.make_credentials())
        any_model = options.models is None
        self._unsupported = UnsupportedFields()
        self.capabilities = msgspec.structs.replace(
            ALL_CAPABILITIES,
            any_model=any_model,
            file_ids=True,
            file_urls=True,
            list_ignored=self._list_ignored_params,
        )
        self._state = UpstreamState() if options.state == "upstream" else None

    async def stream(self, turn: Turn) -> Deltas:
        stripped = self._unsupported.strip(turn)
        previous = await self._find_previous(stripped)
        # Only a large input is estimated now: later it would block the event loop.
        input_tokens = await self.estimate_input(turn) if offload.is_large() else None
        omitted: set[RejectedField] = set()
        while True:
            try:
                return await self._send(stripped, previous, input_tokens)
            except InvalidRequest as error:
                if self._is_lost(error, previous):
                    previous = None
                    continue
                field = self._unsupported.record(error, stripped)
                if field is None or field in omitted:
                    raise
                omitted.add(field)
                logger.warning("backend %s: %s: retrying without it", self.upstream.name, _REJECTIONS[field])
            stripped = self._unsupported.strip(turn)
            previous = await self._find_previous(stripped) if previous is not None else None

    async def _find_previous(self, stripped: StrippedTurn) -> PreviousResponse | None:
        if self._state is None:
            return None
        turn = stripped.turn
        return self._state.find_previous(turn, await offload.run(hash_prefixes, turn.project, turn.items))

    def _is_lost(self, error: InvalidRequest, previous: PreviousResponse | None) -> bool:
        """Return True, and forget the response, if the upstream cannot continue from `previous`."""
        if self._state is None or previous is None:
            return False
        is_missing = isinstance(error, NotFound | PreviousResponseNotFound)
        is_lost = is_missing or find_rejected_field(error) == "encrypted_content"
        if is_lost:
            self._state.forget(previous)
        return is_lost

    def _send(
        self, stripped: StrippedTurn, previous: PreviousResponse | None, input_tokens: int | None
    ) -> Awaitable[Deltas]:
        turn = stripped.turn
        on_completed = functools.partial(self._state.add, turn) if self._state is not None else None

        def estimate(output: Sequence[Raw]) -> Usage:
            fields = map(read_item, output)
            return estimate_output_usage(turn.request, turn.items, fields, input_tokens=input_tokens)

        def make_reader() -> ResponsesReader:
            served_model = ServedModel(self.upstream.name, stripped.model or "")
            return ResponsesReader(
                secrets=self.upstream.secrets,
                on_completed=on_completed,
                served_model=served_model,
                estimate=estimate,
                limits=turn.limits,
            )

        def write(*, stream: bool) -> tuple[bytes, Mapping[str, str]]:
            request = self._writer.write(turn, previous, can_encrypt=stripped.can_encrypt, stream=stream)
            for warning in request.warnings:
                logger.warning("backend %s: %s", self.upstream.name, warning)
            return request.body, request.headers

        return self.send(turn, "/responses", write, make_reader)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.count_upstream("/responses/input_tokens", turn, self._write_count_request)

    def _write_count_request(self, turn: Turn) -> bytes:
        return self._writer.write_count_request(self._unsupported.strip(turn).turn)

    def _list_ignored_params(self, request: CreateRequest, model: str) -> list[str]:
        return [*list_ignored_params(request, model), *self._unsupported.list_ignored_params(request, model)]


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> ResponsesBackend:
    """Create the backend from its configuration. The registry calls this."""
    return ResponsesBackend(name, read_options(options, ResponsesOptions, name=name))
