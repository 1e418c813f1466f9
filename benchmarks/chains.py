"""Time to prepare a turn that continues a chain of responses, in this process, on a store in a file."""

import asyncio
import time
from pathlib import Path

from antiphon.backends.base import Capabilities, Model
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.prepare import resolve
from antiphon.engine.sealing import Sealer, make_secret
from antiphon.protocol.content import InputText, OutputText
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.sqlite.store import SqliteStore
from benchmarks.workloads import SENTENCE

TURNS = (1, 20, 1000)
_MODEL = Model(id="short", created=0, owned_by="benchmarks")
_SEALER = Sealer([make_secret()])


async def measure(folder: Path, *, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Return pairs of milliseconds by chain length: without the chain, and with it."""
    store = SqliteStore(folder / "chains.db")
    await store.open()
    try:
        await asyncio.gather(*(store.save("p", _make_turn(number)) for number in range(max(TURNS))))
        found: dict[int, list[tuple[float, float]]] = {turns: [] for turns in TURNS}
        for _ in range(rounds):
            for turns in TURNS:
                found[turns].append((await _time(store, None), await _time(store, _name(turns - 1))))
    finally:
        await store.close()
    return found


async def _time(store: SqliteStore, previous: str | None) -> float:
    request = CreateRequest(model=_MODEL.id, input="And then?", previous_response_id=previous)
    began = time.perf_counter()
    await resolve(
        request,
        own=request.input,
        project="p",
        model=_MODEL,
        capabilities=Capabilities(),
        store=store,
        policy=Policy(),
        sealer=_SEALER,
    )
    return (time.perf_counter() - began) * 1e3


def _make_turn(number: int) -> StoredResponse:
    token = f"{number:044x}"
    return StoredResponse(
        response=Response(
            id=_name(number),
            created_at=number,
            status="completed",
            model=_MODEL.id,
            previous_response_id=_name(number - 1) if number else None,
            output=[Message("assistant", [OutputText(SENTENCE)], f"msg_{token}0001", "completed")],
        ),
        input=[Message("user", [InputText(SENTENCE)], f"msg_{token}0000", "completed")],
    )


def _name(number: int) -> str:
    return f"resp_{number:044x}"
