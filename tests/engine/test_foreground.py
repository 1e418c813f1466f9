"""Questions to other processes about their foreground responses."""

from collections.abc import Awaitable, Callable

import pytest

from antiphon.errors import NotFound, Unavailable
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.peer_link import PeersUnresponsive
from support.engine_harness import EngineHarness


class RecordingLink:
    """A connection without other processes, or with one that does not answer. Records the questions."""

    def __init__(self, silent_seconds: float | None = None) -> None:
        self._silent_seconds = silent_seconds
        self.answers: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}
        self.questions: list[tuple[str, bytes]] = []

    async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
        self.questions.append((kind, payload))
        if self._silent_seconds is not None:
            raise PeersUnresponsive(self._silent_seconds)
        return []

    async def ask_all(self, kind: str, payload: bytes = b"") -> list[bytes]:
        return []


@pytest.mark.parametrize("response_id", ["unknown", "conv_1", "resp_" + "1" * 200])
async def test_id_that_no_response_has_is_not_sent_to_others(harness: EngineHarness, response_id: str) -> None:
    link = RecordingLink()
    harness.engine.connect(link, lambda announcement: None)
    for operation in (harness.engine.retrieve, harness.engine.cancel):
        for each_id in (response_id, "resp_1"):
            with pytest.raises(NotFound, match=f"'{each_id}' not found"):
                await operation("default", each_id)
    assert link.questions == [("retrieve", b'["default","resp_1"]'), ("cancel", b'["default","resp_1"]')]


@pytest.mark.parametrize(("silent", "retry_after"), [((5.0, None), 10), ((14.9, 20.0), 1), ((15.0, 99.0), None)])
async def test_response_may_be_on_an_unresponsive_process_until_its_lease_ends(
    harness: EngineHarness, silent: tuple[float | None, float | None], retry_after: int | None
) -> None:
    for seconds in silent:
        harness.engine.connect(RecordingLink(seconds), lambda announcement: None)
    for operation in (harness.engine.retrieve, harness.engine.cancel, harness.engine.delete):
        with pytest.raises(NotFound if retry_after is None else Unavailable) as refusal:
            await operation("default", "resp_1")
        error = refusal.value
        code = "not_found" if retry_after is None else "node_unresponsive"
        assert (error.code, error.param, error.retry_after) == (code, "response_id", retry_after)


async def test_response_stored_meanwhile_is_found_though_a_process_is_unresponsive(harness: EngineHarness) -> None:
    class SavingLink(RecordingLink):
        async def ask(self, kind: str, payload: bytes = b"") -> list[bytes]:
            await harness.engine.admin_store.save("default", StoredResponse(response=response, input=[]))
            return await super().ask(kind, payload)

    response = Response(id="resp_1", created_at=1, model="m", status="cancelled")
    harness.engine.connect(SavingLink(1.0), lambda announcement: None)
    assert await harness.engine.retrieve("default", "resp_1") == response
    await harness.engine.delete("default", "resp_1")
    assert await harness.engine.cancel("default", "resp_1") == response
