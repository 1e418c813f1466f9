"""The engine: chains, projects, pages, models and refusals."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.engine.background.responses import BackgroundResponses
from antiphon.engine.engine import Engine
from antiphon.engine.items import ItemPage
from antiphon.errors import (
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PreviousResponseNotFound,
    Unavailable,
    UnsupportedTool,
)
from antiphon.protocol.content import InputText
from antiphon.protocol.items import FunctionCall, Message
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.deltas import Deltas
from support.engine_harness import EngineHarness
from support.recording_backend import RecordingBackend

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
CALLS = {
    "rules": [
        {"last_item": "function_call_output", "answers": ["It was done."]},
        {"user": "call", "answers": [[{"tool_call": {"name": "f", "arguments": "{}", "call_id": "call_1"}}]]},
    ]
}


async def test_response_echoes_request_settings(harness: EngineHarness) -> None:
    response = await harness.answer(
        "hello",
        instructions="Be kind.",
        temperature=0.5,
        metadata={"k": "v"},
        max_output_tokens=50,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "f"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
    )
    assert response.output_text == "You said: hello"
    assert response == Response(
        id=response.id,
        created_at=response.created_at,
        completed_at=response.completed_at,
        status="completed",
        model="scripted",
        served_by="test/scripted",
        instructions="Be kind.",
        temperature=0.5,
        metadata={"k": "v"},
        max_output_tokens=50,
        output=response.output,
        text=response.text,
        tools=response.tools,
        tool_choice=response.tool_choice,
        usage=response.usage,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
    )


async def test_finished_response_is_retrievable_at_once(harness: EngineHarness) -> None:
    response = await harness.answer("hello")
    assert await harness.engine.retrieve("default", response.id) == response


async def test_running_response_is_in_progress(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}]})
    run = await harness.ask()
    reader = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    assert (await harness.engine.retrieve("default", run.response.id)).status == "in_progress"
    with pytest.raises(NotFound):
        await harness.engine.retrieve("other", run.response.id)
    harness.backend.release("gate")
    done = await reader
    assert await harness.engine.retrieve("default", done.id) == done


async def list_input(harness: EngineHarness, response_id: str, project: str = "default", **page: Any) -> Any:
    return await harness.engine.input_items(project, response_id, **{"after": None, "limit": 20, "order": "asc"} | page)


async def test_input_of_a_running_response_is_listed(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}]})
    run = await harness.ask([{"role": "user", "content": text} for text in ("one", "two", "three")])
    reader = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    listed = await list_input(harness, run.response.id)
    last = await list_input(harness, run.response.id, after=listed.data[2].id, limit=1, order="desc")
    with pytest.raises(NotFound):
        await list_input(harness, run.response.id, project="other")
    harness.backend.release("gate")
    await reader
    assert [item.content[0].text for item in listed.data] == ["one", "two", "three"]
    assert (last.data, last.has_more) == (listed.data[1:2], True)
    assert await list_input(harness, run.response.id) == listed


async def test_deleted_running_response_is_cancelled_and_not_stored(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}]})
    run = await harness.ask()
    reader = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    with pytest.raises(NotFound):
        await harness.engine.delete("other", run.response.id)
    await harness.engine.delete("default", run.response.id)
    assert (await reader).status == "cancelled"
    for operation in (harness.engine.retrieve, harness.engine.delete):
        with pytest.raises(NotFound):
            await operation("default", run.response.id)


async def test_running_response_without_storage_is_not_deleted(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"wait": "gate"}, {"text": "Done."}]})
    run = await harness.ask(store=False)
    reader = asyncio.create_task(run.drain())
    await harness.backend.reached("gate")
    with pytest.raises(NotFound):
        await harness.engine.delete("default", run.response.id)
    with pytest.raises(NotFound):
        await list_input(harness, run.response.id)
    harness.backend.release("gate")
    assert (await reader).status == "completed"


async def test_chain_keeps_order_and_can_fork(make_harness: Any) -> None:
    harness = await make_harness({"default": "{history} items, last {input}"})
    first = await harness.answer("one")
    second = await harness.answer("two", previous_response_id=first.id)
    third = await harness.answer("three", previous_response_id=second.id)
    fork = await harness.answer("other", previous_response_id=first.id)
    assert [response.output_text for response in (first, second, third, fork)] == [
        "1 items, last one",
        "3 items, last two",
        "5 items, last three",
        "3 items, last other",
    ]


async def test_unknown_previous_response_is_refused(harness: EngineHarness) -> None:
    with pytest.raises(PreviousResponseNotFound) as caught:
        await harness.ask(previous_response_id="resp_none")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_chain_with_deleted_response_is_refused_with_its_id(harness: EngineHarness) -> None:
    first = await harness.answer("one")
    second = await harness.answer("two", previous_response_id=first.id)
    await harness.engine.delete("default", first.id)
    with pytest.raises(PreviousResponseNotFound, match=first.id):
        await harness.ask(previous_response_id=second.id)


async def test_running_response_cannot_be_continued(make_harness: Any) -> None:
    harness = await make_harness({"rules": [{"user": "first", "answers": [[{"wait": "gate"}, {"text": "done"}]]}]})
    first = (await harness.ask("first", background=True)).response
    await harness.backend.reached("gate")
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask("second", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_ended", "previous_response_id")
    harness.backend.release("gate")
    async for _ in await harness.engine.follow("default", first.id, after=-1):
        pass
    assert (await harness.answer("second", previous_response_id=first.id)).output_text == "You said: second"


@pytest.mark.parametrize("second", [{"role": "user", "content": "b", "id": "msg_1"}, {"id": "msg_1"}])
async def test_duplicate_item_id_in_input_is_refused(harness: EngineHarness, second: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask([{"role": "user", "content": "a", "id": "msg_1"}, second])
    assert (caught.value.code, caught.value.param) == (None, "input")


async def test_duplicate_item_id_is_accepted_without_storage(harness: EngineHarness) -> None:
    twice = [{"role": "user", "content": text, "id": "msg_1"} for text in ("a", "b")]
    assert (await harness.answer(twice, store=False)).output_text == "You said: b"


async def test_unstored_response_cannot_be_retrieved_or_continued(harness: EngineHarness) -> None:
    response = await harness.answer(store=False)
    assert response.store is False
    with pytest.raises(NotFound):
        await harness.engine.retrieve("default", response.id)
    with pytest.raises(PreviousResponseNotFound):
        await harness.ask(previous_response_id=response.id)


async def test_other_project_sees_no_responses(harness: EngineHarness) -> None:
    response = await harness.answer(project="a")
    with pytest.raises(NotFound):
        await harness.engine.retrieve("b", response.id)
    with pytest.raises(NotFound):
        await harness.engine.delete("b", response.id)
    with pytest.raises(NotFound):
        await harness.engine.input_items("b", response.id, after=None, limit=20, order="asc")
    with pytest.raises(PreviousResponseNotFound):
        await harness.ask(project="b", previous_response_id=response.id)
    assert await harness.engine.retrieve("a", response.id) == response


async def test_deleted_response_is_not_found(harness: EngineHarness) -> None:
    response = await harness.answer()
    await harness.engine.delete("default", response.id)
    with pytest.raises(NotFound):
        await harness.engine.delete("default", response.id)


async def test_instructions_are_not_inherited(make_harness: Any) -> None:
    harness = await make_harness({"default": "{history}"})
    first = await harness.answer("one", instructions="Be brief.")
    second = await harness.answer("two", previous_response_id=first.id)
    assert (second.instructions, second.output_text) == (None, "3")


async def test_call_output_is_accepted_through_chain(make_harness: Any) -> None:
    harness = await make_harness(CALLS)
    first = await harness.answer("call f", tools=TOOLS)
    (call,) = first.output
    assert isinstance(call, FunctionCall)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = await harness.answer([output], previous_response_id=first.id, tools=TOOLS)
    assert second.output_text == "It was done."


async def test_continuing_without_pending_call_output_is_refused(make_harness: Any) -> None:
    harness = await make_harness(CALLS)
    first = await harness.answer("call f", tools=TOOLS)
    with pytest.raises(InvalidRequest, match="No tool output found for function call call_1") as caught:
        await harness.ask("never mind", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("input", None)


async def test_unknown_model_is_not_found_and_known_ones_are_listed(harness: EngineHarness) -> None:
    with pytest.raises(ModelNotFound, match=r"'gpt-9' does not exist.*'scripted'") as caught:
        await harness.ask(model="gpt-9")
    assert (caught.value.status, caught.value.param) == (404, "model")


async def test_input_is_stored_as_items_with_ids_and_listed_in_pages(harness: EngineHarness) -> None:
    response = await harness.answer([{"role": "user", "content": f"m{index}"} for index in range(5)])
    everything = await harness.engine.input_items("default", response.id, after=None, limit=100, order="asc")
    assert [item.content for item in everything.data if isinstance(item, Message)] == [
        [InputText(f"m{index}")] for index in range(5)
    ]
    ids = [item.id for item in everything.data]
    assert len(set(ids)) == 5
    newest = await harness.engine.input_items("default", response.id, after=None, limit=2, order="desc")
    assert newest == ItemPage(data=everything.data[:2:-1], first_id=ids[4], last_id=ids[3], has_more=True)
    rest = await harness.engine.input_items("default", response.id, after=ids[3], limit=3, order="desc")
    assert ([item.id for item in rest.data], rest.has_more) == ([ids[2], ids[1], ids[0]], False)


async def test_unknown_cursor_is_refused(harness: EngineHarness) -> None:
    response = await harness.answer()
    with pytest.raises(InvalidRequest) as caught:
        await harness.engine.input_items("default", response.id, after="msg_none", limit=2, order="desc")
    assert caught.value.param == "after"


async def test_models_are_listed(make_harness: Any) -> None:
    harness = await make_harness({"models": ["a", "b"]})
    assert [model.id for model in harness.engine.models()] == ["a", "b"]
    assert (await harness.answer(model="b")).model == "b"


async def test_stopping_engine_refuses_requests(harness: EngineHarness) -> None:
    harness.engine.stop_runs()
    with pytest.raises(Unavailable):
        await harness.ask()


class SilentBackend(RecordingBackend):
    """A backend whose answer never arrives."""

    def __init__(self) -> None:
        super().__init__({"default": "hello"})
        self.called = asyncio.Event()

    async def stream(self, turn: Turn) -> Deltas:
        self.called.set()
        await asyncio.Event().wait()
        return await super().stream(turn)


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_engine_ends_the_wait_for_an_answer(stream: bool) -> None:
    backend = SilentBackend()
    engine = Engine(backends={"test": backend}, store=MemoryStore())
    await engine.start()
    request = CreateRequest(model="scripted", input="hi", stream=stream)
    call = asyncio.create_task(engine.create(request, project="default"))
    await backend.called.wait()
    engine.stop_runs()
    with pytest.raises(Unavailable, match="shutting down"):
        await call
    await engine.close()


async def test_cancelling_the_wait_for_a_whole_answer_is_no_error() -> None:
    backend = SilentBackend()
    engine = Engine(backends={"test": backend}, store=MemoryStore())
    await engine.start()
    call = asyncio.create_task(engine.create(CreateRequest(model="scripted", input="hi"), project="default"))
    await backend.called.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.close()


async def test_repeated_call_output_is_left_out_with_warning(make_harness: Any) -> None:
    harness = await make_harness(CALLS)
    first = await harness.answer("call f", tools=TOOLS)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    second = await harness.answer([output], previous_response_id=first.id)
    run = await harness.ask([output, {"role": "user", "content": "and?"}], previous_response_id=second.id)
    assert run.warnings == ["input[0]: the output of call_1 is part of the history already"]
    assert (await run.drain()).status == "completed"


async def test_call_output_that_differs_from_history_is_refused(make_harness: Any) -> None:
    harness = await make_harness(CALLS)
    first = await harness.answer("call f", tools=TOOLS)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    second = await harness.answer([output], previous_response_id=first.id)
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask([output | {"output": "undone"}], previous_response_id=second.id)
    assert (caught.value.param, "call_1" in caught.value.message) == ("input[0]", True)


async def test_message_with_id_of_other_message_is_not_treated_as_repeated(harness: EngineHarness) -> None:
    """Some clients number their messages anew in every request. Their messages must not be dropped."""
    requested = {"id": "msg_1", "role": "user", "content": "first"}
    first = await harness.answer([requested])
    run = await harness.ask([requested, {"role": "user", "content": "and?"}], previous_response_id=first.id)
    assert run.warnings == ["input[0]: msg_1 is part of the history already"]
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask([requested | {"content": "second"}], previous_response_id=first.id)
    assert caught.value.param == "input[0].id"
    await run.drain()


async def test_client_can_reuse_id_of_answered_call(harness: EngineHarness) -> None:
    call = {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_0", "output": "done"}
    question = {"role": "user", "content": "go on"}
    first = await harness.answer([question, call, output])
    run = await harness.ask([question, call, output | {"output": "again"}], previous_response_id=first.id)
    assert (run.warnings, (await run.drain()).status) == ([], "completed")


async def test_reasoning_without_following_item_is_left_out_with_warning(make_harness: Any) -> None:
    harness = await make_harness({"default": "{history}"})
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    user = {"role": "user", "content": "hi"}
    run = await harness.ask([user, thought, user])
    assert run.warnings == ["history: the reasoning rs_1 led to nothing and was left out"]
    assert (await run.drain()).output_text == "2"


async def test_unsupported_inherited_tools_are_left_out_with_warning(make_harness: Any, tmp_path: Path) -> None:
    mcp = {"type": "mcp", "server_label": "l", "server_url": "https://example.org"}
    able = await make_harness(store=SqliteStore(tmp_path / "antiphon.db"))
    first = await (await able.ask(tools=[mcp])).drain()
    plain = await make_harness({"native_tools": ["function"]}, store=SqliteStore(tmp_path / "antiphon.db"))
    run = await plain.ask("again", previous_response_id=first.id)
    assert run.warnings == ["tools[0]: mcp is not available here and was left out"]
    await run.drain()
    with pytest.raises(UnsupportedTool):
        await plain.ask("again", tools=[mcp])


async def test_model_can_reuse_id_of_answered_call(make_harness: Any) -> None:
    harness = await make_harness(CALLS)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    first = await harness.answer("call f", tools=TOOLS)
    second = await harness.answer([output], previous_response_id=first.id)
    third = await harness.answer("call f", previous_response_id=second.id)
    run = await harness.ask([output], previous_response_id=third.id)
    assert (run.warnings, (await run.drain()).output_text) == ([], "It was done.")


# Start


class TracedBackend(RecordingBackend):
    """A backend that records its start and close, and may fail to start."""

    def __init__(self, name: str, calls: list[str], *, fails: bool = False) -> None:
        super().__init__({})
        self._name = name
        self._calls = calls
        self._fails = fails

    async def start(self) -> None:
        if self._fails:
            raise RuntimeError("no weights")
        self._calls.append(f"start {self._name}")

    async def close(self) -> None:
        self._calls.append(f"close {self._name}")


def check_store_threads_end(before: set[threading.Thread]) -> None:
    """Check that the threads of stores that were started since `before` end. Closing a store does not wait for them."""
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("store-"):
            thread.join(30)
            assert not thread.is_alive()


async def test_failed_start_closes_the_store_and_the_started_backends(tmp_path: Path) -> None:
    calls: list[str] = []
    store = SqliteStore(tmp_path / "store.db")
    backends = {
        "first": TracedBackend("first", calls),
        "second": TracedBackend("second", calls, fails=True),
        "third": TracedBackend("third", calls),
    }
    engine = Engine(backends=backends, store=store)
    # Servers of other tests may have threads too.
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no weights"):
        await engine.start()
    assert calls == ["start first", "close first"]
    assert not engine.ready
    check_store_threads_end(before)


async def test_failed_start_of_the_worker_closes_store_and_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: BackgroundResponses) -> None:
        raise RuntimeError("no worker")

    monkeypatch.setattr(BackgroundResponses, "start", fail)
    calls: list[str] = []
    engine = Engine(backends={"one": TracedBackend("one", calls)}, store=SqliteStore(tmp_path / "store.db"))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no worker"):
        await engine.start()
    assert calls == ["start one", "close one"]
    check_store_threads_end(before)
