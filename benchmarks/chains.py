"""Time to prepare a turn that continues a chain of responses, in this process, on a store in a file."""

import asyncio
import time
from pathlib import Path

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
_MODEL = "scripted"


async def measure(folder: Path, *, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Return pairs of milliseconds by chain length: without the chain, and with it."""
    store = SqliteStore(folder / "chains.db")
    await store.open()
    preparer = Preparer(
        router=ModelRouter({"scripted": create("scripted", {}, folder)}, {}),
        store=store,
        prompts=Prompts(store),
        policy=Policy(),
        sealer=Sealer([make_secret()]),
    )
    try:
        await asyncio.gather(*(store.save("p", _make_turn(number)) for number in range(max(TURNS))))
        found: dict[int, list[tuple[float, float]]] = {turns: [] for turns in TURNS}
        for _ in range(rounds):
            for turns in TURNS:
                found[turns].append((await _time(preparer, None), await _time(preparer, _name(turns - 1))))
    finally:
        await store.close()
    return found


async def _time(preparer: Preparer, previous: str | None) -> float:
    request = CreateRequest(model=_MODEL, input="And then?", previous_response_id=previous)
    began = time.perf_counter()
    await preparer.prepare(request, project="p")
    return (time.perf_counter() - began) * 1e3


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
