"""A model with a configurable context window that counts characters, and helpers to compact turns with it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.base import ALL_CAPABILITIES, Model, Turn
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compaction_item import CompactionContent, unseal_content
from antiphon.engine.serve.compaction.compactor import Compactor
from antiphon.engine.serve.compaction.expansion import expand_compactions, strip_compaction
from antiphon.engine.serve.routing import Candidate, ModelRoute
from antiphon.errors import ContextLengthExceeded
from antiphon.protocol import codec
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Item, Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Usage
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Deltas

PROJECT = "default"
SEALER = Sealer([bytes(32)])
SUMMARY = "Ada wants a bridge. It must be red."


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def call(call_id: str, arguments: str = "{}") -> FunctionCall:
    return FunctionCall(call_id, "look", arguments)


def output(call_id: str, text: str) -> FunctionCallOutput:
    return FunctionCallOutput(text, call_id)


class CountingBackend:
    """A backend that counts `per_token` characters as one token and answers with the text `says`.

    With `refuses`, it does not list its window, and rejects an input that is too long with this message.
    """

    capabilities = ALL_CAPABILITIES

    def __init__(
        self,
        window: int | None,
        *,
        per_token: int = 3,
        says: str | Exception | deltas.Failure | None = SUMMARY,
        refuses: str | None = None,
    ) -> None:
        self._window = window
        self._per_token = per_token
        self._says = says
        self._refuses = refuses
        self.read: list[Turn] = []
        self.refused = 0
        self.open = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def models(self) -> Sequence[Model]:
        listed = self._window if self._refuses is None else None
        return [Model(id="counting", created=0, owned_by="test", context_window=listed)]

    async def count_tokens(self, turn: Turn) -> int:
        text = (turn.request.instructions or "") + "".join(codec.encode(item).decode() for item in turn.items)
        return len(text) // self._per_token

    async def stream(self, turn: Turn) -> Deltas:
        if self._window is not None and await self.count_tokens(turn) >= self._window:
            self.refused += 1
            raise ContextLengthExceeded(self._refuses or "too long", param="input")
        self.read.append(turn)
        if isinstance(self._says, Exception):
            raise self._says
        answer = self._answer()
        await anext(answer)
        return answer

    async def _answer(self) -> Deltas:
        self.open += 1
        try:
            yield []  # the stream has started and must be closed
            if self._says is None:
                await asyncio.get_running_loop().create_future()
            end = self._says if isinstance(self._says, deltas.Failure) else deltas.Finish()
            yield [deltas.Text(str(self._says)), deltas.TokenUsage(Usage(10, 5, 15)), end]
        finally:
            self.open -= 1

    @property
    def route(self) -> ModelRoute:
        return ModelRoute([Candidate("test", self, self.models()[0])])


def make_turn(items: Sequence[Item | Unknown], **fields: Any) -> Turn:
    request = CreateRequest(model="counting", **fields)
    return Turn(request=request, items=list(items), project=PROJECT)


def lay_out(items: Sequence[Item | Unknown]) -> list[Item | Unknown]:
    """Return the items of a turn as the engine has them, with compactions expanded."""
    return expand_compactions(items, SEALER, project=PROJECT).items


def with_items(turn: Turn, items: Sequence[Item | Unknown]) -> Turn:
    """Return the turn as a model gets it, with these items."""
    return strip_compaction(msgspec.structs.replace(turn, items=lay_out(items)))


async def compact(backend: CountingBackend, turn: Turn, *, summary_timeout: float = 5) -> tuple[Any, CompactionContent]:
    """Compact a turn. Return the result and the content of its compaction item."""
    compacted = await Compactor(SEALER, summary_timeout=summary_timeout).compact(backend.route, turn)
    memory = unseal_content(compacted.item, SEALER, project=PROJECT)
    assert memory is not None
    return compacted, memory
