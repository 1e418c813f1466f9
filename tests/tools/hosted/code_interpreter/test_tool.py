"""The items and events of a call, with a container that returns given results."""

import json
from typing import Any

import pytest

from antiphon.engine.respond.ids import Mint
from antiphon.errors import ServerError
from antiphon.stream.deltas import CloseItem, ItemPassthrough, OpenItem
from antiphon.tools.hosted.code_interpreter.messages import CodeResult
from antiphon.tools.hosted.code_interpreter.service import CodeRun
from antiphon.tools.hosted.code_interpreter.tool import CodeCall, CodeSession, make_container_id

ARGUMENTS = json.dumps({"code": "1 + 1"})
LOST = "Variables and imports of earlier calls are lost. Files in /mnt/data are kept."


class FakeContainers:
    """Returns one result, or raises it if it is an error."""

    def __init__(self, result: CodeResult | Exception, *, has_restarted: bool = False) -> None:
        self._result = result
        self._has_restarted = has_restarted

    async def run_code(self, project: str, container_id: str, code: str) -> CodeRun:
        if isinstance(self._result, Exception):
            raise self._result
        return CodeRun(self._result, self._has_restarted, ())


async def run(containers: FakeContainers, arguments: str = ARGUMENTS) -> tuple[list[str], Any]:
    """Return the names of the events, and the final item."""
    session = CodeSession(containers, "p", "cntr_1", None, files=())  # type: ignore[arg-type]
    deltas = [delta async for batch in CodeCall(session, "k").run(arguments) for delta in batch]
    assert isinstance(deltas[0], OpenItem)
    assert isinstance(deltas[-1], CloseItem)
    events = [delta.event.type for delta in deltas if isinstance(delta, ItemPassthrough)]
    return [event.removeprefix("response.code_interpreter_call") for event in events], deltas[-1].item


async def test_completed_call_has_all_events_and_outputs() -> None:
    events, item = await run(FakeContainers(CodeResult(ending="returned", logs="2\n", images=[b"\x89PNG"])))
    assert events == [".in_progress", "_code.delta", "_code.done", ".interpreting", ".completed"]
    assert (item.status, item.code, item.container_id) == ("completed", "1 + 1", "cntr_1")
    assert item.outputs == [
        {"type": "logs", "logs": "2\n"},
        {"type": "image", "url": "data:image/png;base64,iVBORw=="},
    ]


@pytest.mark.parametrize(
    ("result", "note"),
    [
        (CodeResult(ending="timeout"), f"[The code was stopped: it ran longer than the time limit. {LOST}]"),
        (CodeResult(ending="exited"), f"[The code ended the interpreter. {LOST}]"),
        (CodeResult(ending="crashed", reason="stack overflow"), f"[The interpreter stopped. {LOST}] (stack overflow)"),
    ],
)
async def test_lost_interpreter_fails_the_call_and_says_so(result: CodeResult, note: str) -> None:
    events, item = await run(FakeContainers(result))
    assert events[-1] == ".interpreting"
    assert (item.status, item.outputs) == ("failed", [{"type": "logs", "logs": f"{note}\n"}])


async def test_restart_before_the_call_is_in_the_logs() -> None:
    result = CodeResult(ending="returned", logs="2\n")
    _, item = await run(FakeContainers(result, has_restarted=True))
    note = f"The interpreter was restarted before this code. {LOST}\n"
    assert item.outputs == [{"type": "logs", "logs": f"{note}2\n"}]


async def test_cut_output_is_noted() -> None:
    _, item = await run(FakeContainers(CodeResult(ending="returned", logs="x", is_truncated=True, skipped_images=2)))
    assert item.outputs[0]["logs"] == (
        "x\n[The output was cut off: it is too long.] "
        "[2 figures were left out: there are too many, or they are too large.]\n"
    )


async def test_error_of_the_server_fails_the_call() -> None:
    _, item = await run(FakeContainers(ServerError("The code interpreter does not start.")))
    assert (item.status, item.outputs) == (
        "failed",
        [{"type": "logs", "logs": "The code interpreter does not start."}],
    )


def test_written_code_is_not_sent_again() -> None:
    session = CodeSession(FakeContainers(ServerError("")), "p", "cntr_1", None, files=())  # type: ignore[arg-type]
    call = CodeCall(session, "k")
    batches = [call.write(piece) for piece in ('{"code"', ': "1 +', ' 1"', "}")]
    assert [[type(delta).__name__ for delta in batch] for batch in batches] == [
        ["OpenItem", "ItemPassthrough"],
        ["ItemPassthrough"],
        ["ItemPassthrough"],
        [],
    ]


def test_container_id_is_the_same_for_all_attempts() -> None:
    assert make_container_id("resp_0123", 1) == "cntr_012301"
    assert len(make_container_id(Mint().response_id, 31)) <= 64
