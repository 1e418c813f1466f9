"""Preparation of requests: errors and warnings name items by their index in the client's input."""

import asyncio
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.prepare import prepare as prepare_module
from antiphon.engine.prepare.prepare import Prepared, Preparer
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.ids import Mint
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.routing import ModelRouter
from antiphon.errors import AntiphonError, InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import ITEMS, Message
from antiphon.protocol.prompt import PromptDefinition
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from antiphon.store.memory.store import MemoryStore
from antiphon.store.record import find_foreign_items
from antiphon.upstream.media_urls import has_media
from support import strategies
from support.engine_harness import EngineHarness
from support.recording_backend import RecordingBackend


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PICTURE = {"role": "user", "content": [{"type": "input_image"}]}
UPDATE = {"type": "configuration_update", "text": {"format": {"type": "json_schema", "name": "x"}}}
TRIGGER = {"type": "compaction_trigger"}
LACKING = {"type": "item_reference", "id": "msg_lacking"}
NAMELESS = {"type": "item_reference", "id": ""}
MISNAMED = {"type": "acme:x", "id": 5}
FAULTS = [
    (PICTURE, "content[0]"),
    (UPDATE, "text.format.schema"),
    (TRIGGER, ""),
    (LACKING, ""),
    (NAMELESS, "id"),
    (MISNAMED, "id"),
]


async def refuse(harness: EngineHarness, requested: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask(requested, **fields)
    return caught.value


async def make_history(harness: EngineHarness) -> tuple[Response, list[Any]]:
    """Return a response and the history up to it as a client stores it."""
    response = await harness.answer("hello")
    return response, [say("hello"), *response.output]


async def define(harness: EngineHarness, requested: Any) -> dict[str, Any]:
    made = await harness.engine.prompts.define("default", PromptDefinition({"input": requested}))
    return {"id": made.id}


@pytest.mark.parametrize(("item", "field_path"), FAULTS)
async def test_error_names_client_item_after_repeated_items_were_dropped(
    harness: EngineHarness, item: dict[str, Any], field_path: str
) -> None:
    response, history = await make_history(harness)
    error = await refuse(harness, [*history, say("next"), item, say("end")], previous_response_id=response.id)
    assert error.param == ".".join(filter(None, ("input[3]", field_path)))


@pytest.mark.parametrize(("item", "field_path"), FAULTS)
async def test_error_names_client_item_after_prompt_template_items(
    harness: EngineHarness, item: dict[str, Any], field_path: str
) -> None:
    prompt = await define(harness, [say("one"), say("two")])
    error = await refuse(harness, [say("three"), item, say("end")], prompt=prompt)
    assert error.param == ".".join(filter(None, ("input[1]", field_path)))


async def test_error_message_names_same_param(harness: EngineHarness) -> None:
    prompt = await define(harness, "one")
    error = await refuse(harness, [UPDATE], prompt=prompt)
    assert (error.param, error.message, str(error)) == (
        "input[0].text.format.schema",
        "Missing required parameter: 'input[0].text.format.schema'.",
        "Missing required parameter: 'input[0].text.format.schema'.",
    )


async def test_duplicate_item_is_named_by_its_id(harness: EngineHarness) -> None:
    prompt = await define(harness, "one")
    twice = [say("two") | {"id": "msg_1"}, say("three") | {"id": "msg_1"}]
    error = await refuse(harness, twice, prompt=prompt)
    assert (error.param, error.code) == ("input", None)
    assert error.message == "Duplicate item found with id 'msg_1': send each item once, or without an id."


@pytest.mark.parametrize("requested", [None, "hi", [say("hi")]])
async def test_error_in_prompt_template_names_prompt(harness: EngineHarness, requested: Any) -> None:
    prompt = await define(harness, [say("one"), PICTURE])
    assert (await refuse(harness, requested, prompt=prompt)).param == "prompt.input[1].content[0]"


async def test_warnings_name_items_like_errors(make_harness: Any) -> None:
    harness = await make_harness({"native_tools": ["function"]}, unsupported_tools="drop")
    response, history = await make_history(harness)
    prompt = await define(harness, "one")
    tools = {"type": "additional_tools", "role": "developer", "tools": [{"type": "hologram"}]}
    run = await harness.ask([*history, tools, say("next")], prompt=prompt, previous_response_id=response.id)
    assert run.warnings == [
        "input[2].tools[0]: hologram is not available here and was left out",
        "input[0]: this message is part of the history already",
        f"input[1]: {response.output[0].id} is part of the history already",
    ]
    await run.drain()


@pytest.mark.parametrize(
    ("fields", "streamed"),
    [({}, False), ({"stream": False}, False), ({"stream": True}, True), ({"background": True}, True)],
)
async def test_turn_is_streamed_if_its_events_can_be_read(*, fields: dict[str, bool], streamed: bool) -> None:
    backend = RecordingBackend({"default": "hello"})
    engine = Engine(backends={"test": backend}, store=MemoryStore())
    await engine.start()
    body = codec.encode({"model": "scripted", "input": "hi"} | fields)
    run = await engine.create(codec.decode_request(body).body, project="default")
    async for _ in run.events():
        pass
    await engine.close()
    assert [turn.streamed for turn in backend.turns] == [streamed]


def prepare_in_full(request: CreateRequest, *, repair: bool) -> Prepared | str:
    """Prepare a request without the short ways for messages and calls."""
    with (
        patch.object(prepare_module, "_are_messages", return_value=False),
        patch.object(prepare_module, "_are_self_contained", return_value=False),
    ):
        return prepare(request, repair=repair)


def prepare(request: CreateRequest, *, repair: bool) -> Prepared | str:
    """Return the prepared request, with the same ids each time, or the error."""
    store = MemoryStore()
    preparer = Preparer(
        router=ModelRouter({"test": RecordingBackend({"default": "hi"})}, {}),
        store=store,
        prompts=Prompts(store),
        policy=Policy(),
        sealer=Sealer([bytes(32)]),
    )

    async def run() -> Prepared:
        await store.open()
        return await preparer.prepare(request, project="p", repair=repair)

    with patch.object(prepare_module, "Mint", lambda: Mint("t")), patch.object(prepare_module.time, "time", lambda: 0):
        try:
            prepared = asyncio.run(run())
        except AntiphonError as error:
            return f"{error.param}: {error.message}"
    text_items = prepared.turn.text_items  # only the short ways set it
    assert text_items is None or (text_items is prepared.turn.items and not has_media(text_items))
    if prepared.has_own_ids:  # only the short ways set this, too
        response = Response(id=prepared.mint.response_id, created_at=0, model="")
        assert find_foreign_items(StoredResponse(response=response, input=prepared.input)) == []
    turn = msgspec.structs.replace(prepared.turn, find_param=None, text_items=None)
    return msgspec.structs.replace(prepared, turn=turn, route=None, mint=None, has_own_ids=False)


@given(
    st.lists(strategies.instances(Message), max_size=4),
    st.lists(strategies.members(ITEMS), max_size=1),
    st.booleans(),
)
def test_messages_are_prepared_like_any_items(messages: list[Any], others: list[Any], repair: bool) -> None:
    request = CreateRequest(model="scripted", input=[*messages, *others])
    assert prepare(request, repair=repair) == prepare_in_full(request, repair=repair)


CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "call_2", "name": "g", "input": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "2"}
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1/x.png"}


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize(
    "items",
    [
        [say("hi"), CALL, OUTPUT, CUSTOM_CALL, CUSTOM_OUTPUT, say("go on")],
        [say("hi"), CALL],
        [OUTPUT, say("hi")],
        [say("hi"), CALL | {"status": "incomplete"}, say("go on")],
        [say("hi"), CALL, OUTPUT | {"output": [IMAGE]}],
        [say("hi"), CALL | {"id": "fc_1"}, OUTPUT | {"id": "fc_1"}],
        [CALL, OUTPUT, {"type": "item_reference", "id": "msg_lacking"}],
        [CALL, OUTPUT, TRIGGER],
        [CALL, OUTPUT, UPDATE],
    ],
)
def test_calls_are_prepared_like_any_items(items: list[Any], *, repair: bool) -> None:
    request = codec.decode_request(codec.encode({"model": "scripted", "input": items})).body
    assert prepare(request, repair=repair) == prepare_in_full(request, repair=repair)
