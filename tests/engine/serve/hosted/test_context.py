"""The context of later rounds: truncation, compaction, steering, and failures of the store."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.engine.serve.hosted import journal
from antiphon.errors import ContextLengthExceeded, StoreUnavailable
from antiphon.store.memory.store import MemoryStore
from antiphon.stream.deltas import Deltas
from support.hosted_harness import (
    FILE_SEARCH,
    make_call,
    make_script,
    make_search,
    make_text,
    run_engine,
    show_items,
)
from support.hosted_tool import RecordingTool
from support.recording_backend import RecordingBackend


class SmallWindow(RecordingBackend):
    """A model that reads at most `window` items."""

    def __init__(self, answers: dict[str, Any], window: int) -> None:
        super().__init__(answers)
        self._window = window

    async def stream(self, turn: Turn) -> Deltas:
        if len(turn.items) > self._window:
            raise ContextLengthExceeded("too long")
        return await super().stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return len(turn.items)


async def test_truncation_drops_the_oldest_rounds() -> None:
    answers = make_script([make_call("a")], [make_call("b")], [make_call("c")], "Done.")
    backend = SmallWindow(answers, 5)
    async with run_engine(answers, RecordingTool(), backend=backend) as harness:
        response = await harness.answer(tools=[FILE_SEARCH], truncation="auto")
    assert show_items(response.output) == [*(make_search(query) for query in "abc"), make_text("Done.")]
    calls = [item.arguments for item in backend.turns[-1].items if item.type == "function_call"]
    assert calls == ['{"queries":["b"]}', '{"queries":["c"]}']


async def test_context_that_outgrows_the_window_fails_with_the_items_so_far() -> None:
    answers = make_script([make_call("a")], [make_call("b")], "Never.")
    async with run_engine(answers, RecordingTool(), backend=SmallWindow(answers, 4)) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "context_length_exceeded")
    assert show_items(response.output) == [make_search("a"), make_search("b")]


async def test_compaction_between_rounds_replaces_their_items() -> None:
    long = "word " * 200
    answers = make_script([make_call(long)], "A summary.")
    async with run_engine(answers, RecordingTool()) as harness:
        compaction = {"type": "compaction", "compact_threshold": 150}
        response = await harness.answer("go", tools=[FILE_SEARCH], context_management=[compaction])
        final = await harness.answer("more", tools=[FILE_SEARCH], previous_response_id=response.id)
    kinds = [item.type for item in response.output]
    assert kinds == ["file_search_call", "compaction", "message"]
    assert (response.status, final.status) == ("completed", "completed")


async def test_steering_ends_the_running_hosted_call() -> None:
    tool = RecordingTool()
    tool.gate = asyncio.Event()
    async with run_engine(make_script([make_call("cats")], "Never."), tool) as harness:
        run = await harness.ask(tools=[FILE_SEARCH])
        drained = asyncio.create_task(run.drain())
        await tool.reached.wait()
        run.steer()
        response = await drained
        final = await harness.answer("dogs instead", previous_response_id=response.id)
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason, tool.effects) == ("incomplete", "steered", [])
    assert final.status == "completed"


class FailingStore(MemoryStore):
    """A store that fails before and after it has stored steps of hosted tools."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        self.failures += 1
        if self.failures % 3 == 1:
            raise StoreUnavailable("no space")
        is_owner = await super().append_hosted_steps(project, response_id, first, steps, owner=owner)
        if self.failures % 3 == 2:
            raise StoreUnavailable("no answer")
        return is_owner


async def test_steps_wait_for_a_failing_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RETRY_SECONDS", 0.01)
    tool = RecordingTool()
    store = FailingStore()
    answers = make_script([make_call("cats")], [make_call("dogs")], "Done.")
    async with run_engine(answers, tool, store=store) as harness:
        run = await harness.ask(tools=[FILE_SEARCH], background=True)
        async for _ in run.events():
            pass
        response = await harness.engine.retrieve("default", run.response.id)
    calls = [(call.status, call.queries) for call in response.output[:-1]]
    assert (response.status, response.output_text) == ("completed", "Done.")
    assert calls == [("completed", ["cats"]), ("completed", ["dogs"])]
    assert (len(harness.turns), tool.effects, store.failures) == (3, ["cats", "dogs"], 18)


async def test_backend_with_its_own_tools_gets_no_items_of_this_server() -> None:
    answers = {"rules": [{"answers": [[make_call("cats")], "Ours.", "Again."]}]}
    async with run_engine(answers, RecordingTool(), run_hosted_locally=True) as harness:
        response = await harness.answer(tools=[FILE_SEARCH])
        final = await harness.answer("more", tools=[], previous_response_id=response.id)
    kinds = [item.type for item in harness.turns[-1].items]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    assert final.output_text == "Again."
