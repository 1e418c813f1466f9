"""Param paths of items in errors of backends."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.backends.registry import create
from antiphon.engine.background.responses import BackgroundRun
from antiphon.engine.engine import Engine
from antiphon.engine.respond.run import Run
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.events import Failed
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.memory.store import MemoryStore

# Each bridge, and a part that it cannot pass on.
BRIDGES = {
    "chat_completions": {"type": "input_file", "file_id": "file_1"},
    "anthropic_messages": {"type": "input_file", "file_data": "data:application/zip;base64,aGk="},
}
NOWHERE = {"base_url": "http://127.0.0.1:1/v1", "models": ["m"], "request_retries": 0}
HELLO = {"role": "user", "content": "Hello."}
TOOLS = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "f"}]}
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "of another server"}
ANSWER = {"role": "assistant", "content": "Hello to you."}


class Stage:
    """Two models: `scripted` reads everything, and `m` is behind a bridge that nothing gets over."""

    def __init__(self, kind: str) -> None:
        part = BRIDGES[kind]
        self.faulty = {"role": "user", "content": [{"type": "input_text", "text": "See:"}, part]}
        self.path = f"content[1].{list(part)[1]}"
        scripted: Any = create("scripted", name="scripted", options={"script": {}}, data_dir=Path())
        scripted.capabilities = msgspec.structs.replace(scripted.capabilities, file_ids=True)
        backends = {
            "scripted": scripted,
            "bridge": create(kind, name="bridge", options=NOWHERE, data_dir=Path()),
        }
        self.engine = Engine(backends=backends, store=MemoryStore())

    async def ask(self, sent_input: Any, **fields: Any) -> Run | BackgroundRun:
        body = codec.encode({"model": "scripted", "input": sent_input} | fields)
        return await self.engine.create(codec.decode_request(body).body, project="p")

    async def answer(self, sent_input: Any, **fields: Any) -> Response:
        return await (await self.ask(sent_input, **fields)).drain()

    async def refuse(self, sent_input: Any, **fields: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            await self.ask(sent_input, model="m", **fields)
        return caught.value

    async def name_last_input(self, response: Response) -> str | None:
        return (await self.engine.input_items("p", response.id, after=None, limit=1, order="desc")).last_id


@pytest.fixture(params=BRIDGES)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    stage = Stage(request.param)
    await stage.engine.start()
    yield stage
    await stage.engine.close()


async def test_input_item_error_has_its_path_with_any_history(stage: Stage) -> None:
    first = await stage.answer([HELLO, ANSWER, HELLO])
    error = await stage.refuse([HELLO, stage.faulty], previous_response_id=first.id)
    assert error.param == f"input[1].{stage.path}"


async def test_input_item_path_is_right_after_items_are_translated(stage: Stage) -> None:
    error = await stage.refuse([HELLO, TOOLS, SEARCH, THOUGHT, ANSWER, stage.faulty])
    assert error.param == f"input[5].{stage.path}"


async def test_template_item_error_has_the_template_path(stage: Stage) -> None:
    made = await stage.engine.prompts.define("p", PromptDefinition({"input": [HELLO, stage.faulty]}))
    assert (await stage.refuse([HELLO], prompt={"id": made.id})).param == f"prompt.input[1].{stage.path}"


async def test_input_item_after_a_template_has_its_own_path(stage: Stage) -> None:
    made = await stage.engine.prompts.define("p", PromptDefinition({"input": [HELLO, HELLO]}))
    assert (await stage.refuse([stage.faulty], prompt={"id": made.id})).param == f"input[0].{stage.path}"


async def test_history_item_error_has_the_item_id(stage: Stage) -> None:
    first = await stage.answer([HELLO, stage.faulty])
    error = await stage.refuse([HELLO, HELLO], previous_response_id=first.id)
    assert error.message.startswith(f"In the item '{await stage.name_last_input(first)}': ")
    assert (error.param, str(error)) == ("previous_response_id", error.message)


async def test_conversation_item_error_has_the_item_id(stage: Stage) -> None:
    conversation = await stage.engine.conversations.create("p", [], None)
    first = await stage.answer([stage.faulty], conversation=conversation.id)
    error = await stage.refuse([HELLO, HELLO], conversation=conversation.id)
    assert error.message.startswith(f"In the item '{await stage.name_last_input(first)}': ")
    assert error.param == "conversation"


async def test_background_failure_names_the_item_by_its_id(stage: Stage) -> None:
    run = await stage.ask([HELLO, stage.faulty], model="m", background=True)
    reported = [event async for batch in run.events() for event in batch]
    assert isinstance(reported[-1], Unknown)
    failed = codec.decode_event(reported[-1].raw)
    assert isinstance(failed, Failed)
    assert failed.response.error is not None
    named = await stage.name_last_input(failed.response)
    assert failed.response.error.message.startswith(f"In the item '{named}': ")
    assert failed.response.error.param is None
