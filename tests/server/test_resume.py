"""A stream is the same, however often its reader disconnects and resumes."""

import asyncio
import contextlib
import http.client
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.base import Turn
from antiphon.backends.scripted.backend import ScriptedBackend, TurnContext
from antiphon.backends.scripted.script import Script
from antiphon.engine.background import event_writer
from antiphon.protocol import codec
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Delta, Deltas
from antiphon.stream.fold import fold
from support.crashing_server import TIMEOUT, read_events
from support.live_server import LiveServer, make_settings
from support.turns import turns


class PausingBackend(ScriptedBackend):
    """Emits the deltas registered for a message, and pauses in the middle."""

    def __init__(self) -> None:
        super().__init__("scripted", Script())
        self.turns: dict[str, tuple[Sequence[Delta], int]] = {}
        self.pauses: dict[str, asyncio.Event] = {}

    async def stream(self, turn: Turn) -> Deltas:
        return self._emit(TurnContext(turn).user)

    async def _emit(self, name: str) -> Deltas:
        deltas, middle = self.turns[name]
        for number, delta in enumerate(deltas):
            if number == middle:
                await self.pauses.setdefault(name, asyncio.Event()).wait()
            yield [delta]
            await asyncio.sleep(0)

    def resume(self, name: str) -> None:
        self.pauses.setdefault(name, asyncio.Event()).set()


@pytest.fixture(scope="module")
def pausing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that writes its event log one event at a time."""
    store = SqliteStore(tmp_path_factory.mktemp("resume") / "store.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_writer, "FLUSH_SECONDS", 1e-6)
        running = LiveServer({}, make_settings(), store, backend=PausingBackend())
        yield running
        running.stop()


names = map(str, itertools.count())


@pytest.mark.usefixtures("unchecked_wire")
@given(turns, st.integers(0, 30), st.lists(st.integers(0, 12), max_size=6))
def test_stream_cut_anywhere_resumes_without_loss(
    pausing_server: Any, deltas: list[Delta], middle: int, sizes: list[int]
) -> None:
    name = next(names)
    pausing_server.backend.turns[name] = deltas, min(middle, len(deltas) - 1)
    body = {"model": "scripted", "input": name, "background": True}
    response_id = pausing_server.ask("POST", "/v1/responses", body).json["id"]
    joined: list[bytes] = []
    for size in sizes:
        joined += read_piece(pausing_server, response_id, len(joined), size)
        pausing_server.do(lambda: pausing_server.backend.resume(name))  # from here on the stream is read while it grows
    pausing_server.do(lambda: pausing_server.backend.resume(name))
    joined += read_piece(pausing_server, response_id, len(joined), None)
    assert joined == read_piece(pausing_server, response_id, 0, None)
    fold(codec.decode_event(event) for event in joined)
    for cut in {0, len(joined) // 2, len(joined)}:
        assert read_piece(pausing_server, response_id, cut, None) == joined[cut:]


def read_piece(running: Any, response_id: str, begin: int, size: int | None) -> list[bytes]:
    """Read `size` events from a sequence number on, or all, and close the connection."""
    cursor = f"&starting_after={begin - 1}" if begin else ""
    # At least three events precede the pause. A reader of more could wait for its end.
    size = min(size, 3) if begin == 0 and size is not None else size
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    with contextlib.closing(connection):
        connection.request("GET", f"/v1/responses/{response_id}?stream=true{cursor}")
        with connection.getresponse() as response:
            assert response.status == 200
            return list(itertools.islice(read_events(response), size))
