"""However often its reader leaves and comes back, a stream is the same stream."""

import asyncio
import contextlib
import http.client
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
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


class Teller(ScriptedBackend):
    """Says whatever it was given for a message, and waits in the middle of it."""

    def __init__(self) -> None:
        super().__init__("scripted", Script())
        self.turns: dict[str, tuple[Sequence[Delta], int]] = {}
        self.pauses: dict[str, asyncio.Event] = {}

    async def stream(self, turn: Turn) -> Deltas:
        return self._tell(TurnContext(turn).user)

    async def _tell(self, name: str) -> Deltas:
        said, middle = self.turns[name]
        for number, delta in enumerate(said):
            if number == middle:
                await self.pauses.setdefault(name, asyncio.Event()).wait()
            yield [delta]
            await asyncio.sleep(0)

    def go_on(self, name: str) -> None:
        self.pauses.setdefault(name, asyncio.Event()).set()


@pytest.fixture(scope="module")
def teller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose log grows event by event."""
    store = SqliteStore(tmp_path_factory.mktemp("resume") / "store.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_writer, "FLUSH_SECONDS", 0)
        running = LiveServer({}, make_settings(), store, backend=Teller())
        yield running
        running.stop()


names = map(str, itertools.count())


@settings(max_examples=100)
@given(turns, st.integers(0, 30), st.lists(st.integers(0, 12), max_size=6))
def test_the_pieces_of_a_stream_cut_anywhere_join_to_the_whole(
    teller: Any, said: list[Delta], middle: int, sizes: list[int]
) -> None:
    name = next(names)
    teller.backend.turns[name] = said, min(middle, len(said) - 1)
    asked = {"model": "scripted", "input": name, "background": True}
    response_id = teller.ask("POST", "/v1/responses", asked).json["id"]
    joined: list[bytes] = []
    for size in sizes:
        joined += read_piece(teller, response_id, len(joined), size)
        teller.do(lambda: teller.backend.go_on(name))  # from here on, the stream is read while it grows
    teller.do(lambda: teller.backend.go_on(name))
    joined += read_piece(teller, response_id, len(joined), None)
    assert joined == read_piece(teller, response_id, 0, None)
    fold(codec.decode_event(event) for event in joined)
    for cut in {0, len(joined) // 2, len(joined)}:
        assert read_piece(teller, response_id, cut, None) == joined[cut:]


def read_piece(running: Any, response_id: str, begin: int, size: int | None) -> list[bytes]:
    """So many events from this number on, or all; fewer only if the stream ends. Then the connection is cut."""
    place = f"&starting_after={begin - 1}" if begin else ""
    # Before the pause there are three events at least; whoever wants more might wait for it to end.
    size = min(size, 3) if begin == 0 and size is not None else size
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    with contextlib.closing(connection):
        connection.request("GET", f"/v1/responses/{response_id}?stream=true{place}")
        with connection.getresponse() as response:
            assert response.status == 200
            return list(itertools.islice(read_events(response), size))
