"""The engine in this very process, for a chat without a server."""

import asyncio
from collections.abc import Sequence

from antiphon.cli.remote import Events
from antiphon.config import DEFAULT_PROJECT, Settings
from antiphon.engine.assemble import build_engine
from antiphon.engine.run import Events as Batches
from antiphon.protocol.events import Event
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest


class Local:
    """Asked like a remote server. The loop turns only while there is something to wait for.

    `asyncio.Runner` makes a Ctrl-C cancel what is being waited for, so that the model has stopped when
    KeyboardInterrupt gets here.
    """

    def __init__(self, settings: Settings) -> None:
        self._runner = asyncio.Runner()
        self._engine = build_engine(settings)
        try:
            self._runner.run(self._engine.start())
        except BaseException:
            self._runner.close()
            raise

    def models(self) -> list[str]:
        return [model.id for model in self._engine.models()]

    def ask(self, request: CreateRequest) -> Events:
        run = self._runner.run(self._engine.create(request, project=DEFAULT_PROJECT))
        batches = run.events()
        try:
            while batch := self._runner.run(_next_batch(batches)):
                yield from batch
        finally:
            self._runner.run(batches.aclose())

    def close(self) -> None:
        try:
            self._runner.run(self._engine.close())
        finally:
            self._runner.close()


async def _next_batch(batches: Batches) -> Sequence[Event | Unknown] | None:
    return await anext(batches, None)
