"""The engine on the store's own queue. See desk.py for the command."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing

from antiphon.backends.base import Capabilities, Deltas, Model, Turn
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.protocol.response import FINAL_STATUSES, Usage
from antiphon.store.base import NO_LIMITS, StoredResponse
from antiphon.store.limits import RunLimits
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Finish, Text, Tokens
from benchmarks.drivers import desk
from benchmarks.drivers.desk import Place, Record, serve

PROJECT = "benchmarks"
REQUEST = codec.decode_request(
    b'{"model":"speaker","input":"When does it leave?","background":true,"stream":true}'
).request


class Speaker:
    """Serves the model of the desk."""

    capabilities = Capabilities()

    def __init__(self, model: desk.Model) -> None:
        self._model = model

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def models(self) -> Sequence[Model]:
        return [Model(id="speaker", created=0, owned_by="benchmarks")]

    async def stream(self, turn: Turn) -> Deltas:
        return self._speak()

    async def _speak(self) -> Deltas:
        async for pieces in self._model.speak():
            yield [Text(piece) for piece in pieces]
        yield [Tokens(Usage(10, 20, 30)), Finish()]

    async def count_tokens(self, turn: Turn) -> int:
        return 0


class HaltingStore(SqliteStore):
    """A store that, told so, accepts a response and then lets nothing more happen."""

    halts = False
    accepted: asyncio.Queue[str]

    async def enqueue(self, project: str, stored: StoredResponse, request: bytes) -> None:
        await super().enqueue(project, stored, request)
        if self.halts:
            self.accepted.put_nowait(stored.response.id)
            await asyncio.Event().wait()


class LeaseQueue:
    def __init__(self, engine: Engine, store: HaltingStore, model: desk.Model) -> None:
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

    async def stop_short(self) -> str:
        self._store.halts = True
        self._halted.append(asyncio.create_task(self._engine.create(REQUEST, project=PROJECT)))
        return await self._store.accepted.get()

    async def look(self, ids: list[str]) -> list[Record]:
        return [await self._look(response_id) for response_id in ids]

    async def _look(self, response_id: str) -> Record:
        response = await self._engine.retrieve(PROJECT, response_id)
        events = [json.loads(line) for _, line in await self._store.read_events(PROJECT, response_id, -1)]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return Record(text if response.status in FINAL_STATUSES else None, len(events))


async def open_queue(place: Place, limits: RunLimits = NO_LIMITS) -> LeaseQueue:
    store = HaltingStore(place.folder / "responses.db", home="benchmarks")
    store.accepted = asyncio.Queue()
    model = desk.Model(place)
    policy = Policy(background_slots=1000, background_lease_seconds=place.lease, background_limits=limits)
    engine = Engine(backends={"speaker": Speaker(model)}, store=store, policy=policy)
    await engine.start()
    return LeaseQueue(engine, store, model)


if __name__ == "__main__":
    serve(open_queue)
