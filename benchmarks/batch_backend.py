"""A backend with several deltas per batch, as a fast upstream sends them.

The scripted backend, which serves the other models, yields one delta at a time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Delta, Deltas, Finish, Text, TokenUsage
from benchmarks.workloads import ANSWERS

KIND = "benchmark-batches"
MODELS = ("brief-batched", "long-batched")


class BatchBackend:
    capabilities = Capabilities()

    def __init__(self) -> None:
        self._batches: dict[str, list[list[Delta]]] = {
            model: [[Text(piece) for piece in pieces] for pieces in ANSWERS[model]] for model in MODELS
        }

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id=model, created=0, owned_by="benchmarks") for model in MODELS]

    async def stream(self, turn: Turn) -> Deltas:
        return self._emit(self._batches[turn.request.model or ""])

    async def _emit(self, batches: list[list[Delta]]) -> Deltas:
        for batch in batches:
            yield batch
            await asyncio.sleep(0)
        yield [TokenUsage(Usage(10, 20, 30)), Finish()]

    async def count_tokens(self, turn: Turn) -> int:
        return 0


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> BatchBackend:
    return BatchBackend()
