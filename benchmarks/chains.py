"""CPU time to prepare a turn that continues a chain of responses, in this process, on a store in a file."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from antiphon.backends.scripted.backend import create
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import Preparer
from antiphon.engine.prompts import Prompts
from antiphon.engine.sealing import Sealer, make_secret
from antiphon.engine.serve.routing import ModelRouter
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore
from benchmarks.workloads import SENTENCE

TURNS = (1, 20, 1000)
ITEMS_A_TURN = 2
_MODEL = "scripted"


class Sample(NamedTuple):
    """CPU time in ms to prepare a request: without a chain, as its next turn, and as the first request of a process."""

    without: float
    next_turn: float
    first: float


async def measure(folder: Path, *, rounds: int) -> dict[int, list[Sample]]:
    """Return samples by chain length."""
    async with _open(folder) as (store, _):
        await asyncio.gather(*(store.save("p", _make_turn(number)) for number in range(max(TURNS))))
    found: dict[int, list[Sample]] = {turns: [] for turns in TURNS}
    for _ in range(rounds):
        for turns in TURNS:
            found[turns].append(await _measure_turn(folder, turns))
    return found


async def _measure_turn(folder: Path, turns: int) -> Sample:
    """Measure one request that continues a chain of this length, with a store that was just opened."""
    newest = _name(turns - 1)
    async with _open(folder) as (_, preparer):
        await _time(preparer, None)
        without, first = await _time(preparer, None), await _time(preparer, newest)
    async with _open(folder) as (_, preparer):
        await _time(preparer, _name(turns - 2) if turns > 1 else None)
        return Sample(without, await _time(preparer, newest), first)


@asynccontextmanager
async def _open(folder: Path) -> AsyncIterator[tuple[SqliteStore, Preparer]]:
    store = SqliteStore(folder / "chains.db")
    await store.open()
    await store.load("p", "resp_unknown")  # SQLite reads the schema at the first statement
    try:
        yield (
            store,
            Preparer(
                router=ModelRouter({"scripted": create("scripted", {}, folder)}, {}),
                store=store,
                prompts=Prompts(store),
                policy=Policy(),
                sealer=Sealer([make_secret()]),
            ),
        )
    finally:
        await store.close()


async def _time(preparer: Preparer, previous: str | None) -> float:
    request = CreateRequest(model=_MODEL, input="And then?", previous_response_id=previous)
    gc.collect()  # garbage of earlier measurements is not collected in this one
    began = time.process_time()
    await preparer.prepare(request, project="p")
    return (time.process_time() - began) * 1e3


def _make_turn(number: int) -> StoredResponse:
    token = f"{number:044x}"
    return StoredResponse(
        response=Response(
            id=_name(number),
            created_at=number,
            status="completed",
            model=_MODEL,
            previous_response_id=_name(number - 1) if number else None,
            output=[Message("assistant", [OutputText(SENTENCE)], f"msg_{token}0001", "completed")],
        ),
        input=[Message("user", [InputText(SENTENCE)], f"msg_{token}0000", "completed")],
    )


def _name(number: int) -> str:
    return f"resp_{number:044x}"
