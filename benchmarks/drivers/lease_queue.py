"""Driver of the store's lease queue. See queue_driver.py for the command."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.response import FINAL_STATUSES, Usage
from antiphon.store.base import NO_LIMITS, StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Deltas, Finish, Text, TokenUsage
from benchmarks.drivers import queue_driver
from benchmarks.drivers.queue_driver import Arguments, Record, serve

PROJECT = "benchmarks"
REQUEST = codec.decode_request(
    b'{"model":"timetable","input":"When does it leave?","background":true,"stream":true}'
).body


class TimetableBackend:
    """A backend for the model of the driver."""

    capabilities = Capabilities()

    def __init__(self, model: queue_driver.Model) -> None:
        self._model = model

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id="timetable", created=0, owned_by="benchmarks")]

    async def stream(self, turn: Turn) -> Deltas:
        return self._emit()

    async def _emit(self) -> Deltas:
        async for pieces in self._model.answer():
            yield [Text(piece) for piece in pieces]
        yield [TokenUsage(Usage(10, 20, 30)), Finish()]

    async def count_tokens(self, turn: Turn) -> int:
        return 0


class HaltingStore(SqliteStore):
    """A store that blocks after it has accepted a response, if `halts` is set."""

    halts = False
    accepted: asyncio.Queue[str]

    async def enqueue(self, project: str, stored: StoredResponse, request: bytes, **options: Any) -> None:
        await super().enqueue(project, stored, request, **options)
        if self.halts:
            self.accepted.put_nowait(stored.response.id)
            await asyncio.Event().wait()


class LeaseQueue:
    def __init__(self, engine: Engine, store: HaltingStore, model: queue_driver.Model) -> None:
        self._engine = engine
        self._store = store
        self._halted: list[asyncio.Task[object]] = []
        self.model = model

    async def answer(self) -> str:
        run = await self._engine.create(REQUEST, project=PROJECT)
        text = ""
        async with aclosing(run.events()) as batches:
            async for batch in batches:
                for event in batch:
                    if event.type == "response.output_text.delta":
                        text += json.loads(codec.encode(event))["delta"]
        return text

    async def accept(self) -> str:
        return (await self._engine.create(REQUEST, project=PROJECT)).response.id

    async def accept_only(self) -> str:
        self._store.halts = True
        self._halted.append(asyncio.create_task(self._engine.create(REQUEST, project=PROJECT)))
        return await self._store.accepted.get()

    async def read_records(self, ids: list[str]) -> list[Record]:
        return [await self._read_record(response_id) for response_id in ids]

    async def _read_record(self, response_id: str) -> Record:
        response = await self._engine.retrieve(PROJECT, response_id)
        events = [json.loads(line) for _, line in await self._store.read_events(PROJECT, response_id, -1)]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return Record(text if response.status in FINAL_STATUSES else None, len(events))


async def open_queue(arguments: Arguments, limits: RunLimits = NO_LIMITS) -> LeaseQueue:
    store = HaltingStore(arguments.folder / "responses.db", configuration_id="benchmarks")
    store.accepted = asyncio.Queue()
    model = queue_driver.Model(arguments)
    policy = Policy(background_slots=1000, background_lease_seconds=arguments.lease, background_limits=limits)
    engine = Engine(backends={"timetable": TimetableBackend(model)}, store=store, policy=policy)
    await engine.start()
    return LeaseQueue(engine, store, model)


if __name__ == "__main__":
    serve(open_queue)
