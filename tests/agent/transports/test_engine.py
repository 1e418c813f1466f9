"""The transport into an engine: failures of the engine are errors as over HTTP."""

from typing import Any

import pytest

from antiphon.agent.transports.engine import LocalTransport
from antiphon.errors import ServerError
from support.scripted_model import ScriptedModel


class Broken:
    async def create(self, request: Any, *, project: str) -> Any:
        raise LookupError(f"no backend for {request.model} of {project}")


async def test_unexpected_exception_is_a_logged_server_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ServerError) as raised:
        await LocalTransport(Broken()).stream({"model": "m", "input": "hi"})
    assert (raised.value.code, raised.value.message) == (
        "server_error",
        "The model cannot be used: LookupError. See the log.",
    )
    assert "no backend for m of default" in caplog.text


async def test_broken_backend_fails_a_run_that_can_be_resumed(in_process: ScriptedModel) -> None:
    in_process.set_answers(*[[{"crash": "the power went out"}]] * 3, "It is mild.")
    agent = in_process.agent()
    outcome = await agent.run("How is it?")
    assert outcome.error is not None
    assert (outcome.kind, outcome.error.code) == ("failed", "server_error")
    assert outcome.state is not None
    assert (await agent.resume(outcome.state)).text == "It is mild."
