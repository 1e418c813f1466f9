"""The history of a request: referenced items, chains and conversations."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.prepare.history import load_history
from antiphon.engine.sealing import Sealer
from antiphon.errors import InvalidRequest, NotFound
from antiphon.protocol import codec
from antiphon.protocol.content import extract_text
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import Item, ItemReference, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import parse_response_id
from antiphon.store.location import locate_store
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.fold import fold
from support.engine_harness import EngineHarness

FOREIGN = {
    "type": "message",
    "id": "msg_foreign1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "I come from elsewhere.", "annotations": [], "logprobs": []}],
}
SCRIPT = {
    "rules": [
        {"user": "foreign", "answers": [[{"item": FOREIGN}]]},
        {"user": "fail", "answers": [[{"text": "Half"}, {"failure": {"message": "No more."}}]]},
        {"user": "wait", "answers": [[{"text": "Half"}, {"wait": "gate"}]]},
    ],
    "default": "{history} items",
}


@pytest.fixture(params=["memory", "sqlite"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path, make_harness: Any) -> EngineHarness:
    url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/store.db"}[request.param]
    made: EngineHarness = await make_harness(SCRIPT, store=locate_store(url))
    return made


def say(text: str, item_id: str | None = None) -> dict[str, Any]:
    message = {"type": "message", "role": "user", "content": text}
    return message if item_id is None else message | {"id": item_id}


def refer(item_id: str | None) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def get_texts(items: list[Item | Unknown]) -> list[str]:
    return [extract_text(item.content) for item in items if isinstance(item, Message)]


async def resolve(harness: EngineHarness, item_id: str | None, *, project: str = "default") -> str:
    """Return the text of the item that a reference to this id resolves to."""
    response = await harness.answer([refer(item_id), say("and?")], project=project)
    page = await harness.engine.input_items(project, response.id, after=None, limit=9, order="asc")
    assert [page.data[0].id, response.output_text] == [item_id, "2 items"]
    return get_texts(page.data)[0]


# References


async def test_reference_finds_an_item_with_a_client_id(harness: EngineHarness) -> None:
    await harness.answer([say("hello", "msg_mine")])
    assert await resolve(harness, "msg_mine") == "hello"


async def test_reference_finds_an_item_with_a_backend_id(harness: EngineHarness) -> None:
    await harness.answer("foreign")
    assert await resolve(harness, "msg_foreign1") == "I come from elsewhere."


async def test_reference_finds_an_item_in_stored_input(harness: EngineHarness) -> None:
    unstored = await harness.answer("hello", store=False)
    await harness.answer([*unstored.output, say("and?")])
    assert await resolve(harness, unstored.output[0].id) == "1 items"


async def test_referenced_item_of_a_deleted_response_is_not_found(harness: EngineHarness) -> None:
    first = await harness.answer("hello")
    second = await harness.answer([refer(first.output[0].id), say("and?")])
    await harness.engine.delete("default", first.id)
    with pytest.raises(NotFound):
        await harness.ask([refer(first.output[0].id)])
    stored_items = await harness.engine.retrieve("default", second.id)
    assert stored_items == second


async def test_reference_to_deleted_responses_is_not_found(harness: EngineHarness) -> None:
    responses = [await harness.answer([say("hello", "msg_mine")]) for _ in range(2)]
    for response in responses:
        await harness.engine.delete("default", response.id)
    with pytest.raises(NotFound) as caught:
        await harness.ask([refer("msg_mine")])
    assert caught.value.param == "input[0]"


async def test_reference_finds_an_item_of_a_running_response(harness: EngineHarness) -> None:
    running = (await harness.ask([say("wait", "msg_mine")], background=True)).response
    await harness.backend.reached("gate")
    conversation = await harness.engine.conversations.create(
        "default", codec.decode_items(b'[{"id":"msg_mine"}]'), None
    )
    listed = await harness.store.load_conversation_items("default", conversation.id)
    assert listed is not None
    assert get_texts(listed) == ["wait"]
    await harness.engine.cancel("default", running.id)


async def test_reference_to_another_project_is_not_found(harness: EngineHarness) -> None:
    await harness.answer([say("hello", "msg_mine")], project="theirs")
    await harness.answer("foreign", project="theirs")
    for item_id in ("msg_mine", "msg_foreign1"):
        with pytest.raises(NotFound):
            await harness.ask([refer(item_id)])
    assert await resolve(harness, "msg_mine", project="theirs") == "hello"


async def test_items_of_their_own_response_need_no_reference_row(make_harness: Any, tmp_path: Path) -> None:
    harness = await make_harness(SCRIPT, store=SqliteStore(tmp_path / "store.db"))
    first = await harness.answer("hello")
    second = await harness.answer([say("and?"), say("well?")], previous_response_id=first.id)
    stored_items = await harness.store.load("default", second.id)
    assert stored_items is not None
    items = [*stored_items.input, *stored_items.response.output]
    assert [await harness.store.find_item("default", item.id) for item in items] == [None] * 3
    assert await resolve(harness, stored_items.input[0].id) == "and?"


# A chain that begins in a conversation


async def converse(harness: EngineHarness, *texts: str) -> str:
    items = codec.decode_items(codec.encode([say(text) for text in texts]))
    return (await harness.engine.conversations.create("default", items, None)).id


async def read(harness: EngineHarness, response_id: str) -> tuple[list[str], list[str]]:
    """Return the texts and repairs of the history of a continuation."""
    context = await load_history(
        CreateRequest(input="and?", previous_response_id=response_id),
        project="default",
        store=harness.store,
        sealer=Sealer([bytes(32)]),
        inherit_tools=False,
    )
    return get_texts(context.items), context.repairs


async def test_chain_from_a_conversation_starts_with_its_items(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    await harness.answer("one", conversation=conversation)
    second = await harness.answer("two", conversation=conversation)
    await harness.answer("later", conversation=conversation)
    third = await harness.answer("three", previous_response_id=second.id)
    fourth = await harness.answer("four", previous_response_id=third.id)
    assert [third.output_text, fourth.output_text] == ["6 items", "8 items"]
    before = ["My name is Ada.", "one", "2 items", "two", "4 items"]
    assert await read(harness, second.id) == (before, [])
    assert await read(harness, fourth.id) == ([*before, "three", "6 items", "four", "8 items"], [])


async def test_chain_from_the_first_response_reads_items_once(harness: EngineHarness) -> None:
    conversation = await converse(harness)
    first = await harness.answer([say("one", "msg_mine")], conversation=conversation)
    assert await read(harness, first.id) == (["one", "1 items"], [])


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
async def test_failed_response_comes_after_its_conversation(harness: EngineHarness, ending: str) -> None:
    conversation = await converse(harness, "My name is Ada.")
    if ending == "failed":
        broken = await harness.answer("fail", conversation=conversation)
    else:
        broken = (await harness.ask("wait", conversation=conversation, background=True)).response
        await harness.backend.reached("gate")
        broken = await harness.engine.cancel("default", broken.id)
    await harness.answer("one", conversation=conversation)
    sent_input = {"failed": "fail", "cancelled": "wait"}[ending]
    assert broken.status == ending
    assert await read(harness, broken.id) == (["My name is Ada.", "one", "2 items", sent_input, "Half"], [])


async def test_deleted_items_do_not_move_the_end_of_the_history(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    first = await harness.answer([say("one", "msg_mine"), say("two")], conversation=conversation)
    await harness.engine.conversations.delete_item("default", conversation, "msg_mine")
    await harness.answer("later", conversation=conversation)
    assert await read(harness, first.id) == (["My name is Ada.", "one", "two", "3 items"], [])


async def test_response_with_all_items_deleted_keeps_its_position(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    first = await harness.answer([say("one", "msg_mine")], conversation=conversation)
    for item_id in ("msg_mine", str(first.output[0].id)):
        await harness.engine.conversations.delete_item("default", conversation, item_id)
    await harness.answer("later", conversation=conversation)
    assert await read(harness, first.id) == (["My name is Ada.", "one", "2 items"], [])


async def test_response_without_items_has_a_position(make_harness: Any) -> None:
    harness = await make_harness({"rules": [{"user": "Ada", "answers": [[]]}], "default": "{history} items"})
    conversation = await converse(harness, "My name is Ada.")
    silent = await harness.answer([], conversation=conversation)
    await harness.answer("later", conversation=conversation)
    assert silent.output == []
    assert await read(harness, silent.id) == (["My name is Ada."], [])


async def test_chain_of_a_deleted_conversation_continues_with_a_warning(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    first = await harness.answer("one", conversation=conversation)
    await harness.engine.conversations.delete("default", conversation)
    run = await harness.ask("two", previous_response_id=first.id)
    assert run.warnings == [f"history: the conversation {conversation} was deleted, with its items before {first.id}"]
    assert (await run.drain()).output_text == "3 items"


async def test_chain_does_not_read_a_conversation_of_another_project(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    first = await harness.answer("one", conversation=conversation)
    stored_items = await harness.store.load("default", first.id)
    assert stored_items is not None
    await harness.store.save("theirs", stored_items)
    continued = await harness.answer("two", project="theirs", previous_response_id=first.id)
    assert continued.output_text == "3 items"


# Two that bring the same to one conversation


@pytest.fixture(params=[{}, {"background": True}, {"store": False}], ids=["stored", "background", "unstored"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


async def answer_at_once(harness: EngineHarness, sent_input: list[list[Any]], **options: Any) -> list[Response]:
    """Send all inputs concurrently and return their responses."""

    async def answer(each: list[Any]) -> Response:
        run = await harness.ask([*each, say("wait")], **options)
        all_items = [event async for batch in run.events() for event in batch]
        # The events of a background response come from the log, undecoded.
        return fold(codec.decode_event(event.raw) if isinstance(event, Unknown) else event for event in all_items)

    answers = asyncio.gather(*map(answer, sent_input))
    for _ in sent_input:
        await harness.backend.reached("gate")
    for _ in sent_input:
        harness.backend.release("gate")
    return await answers


async def list_items(harness: EngineHarness, conversation: str) -> list[tuple[str | None, str]]:
    items = await harness.store.load_conversation_items("default", conversation)
    assert items is not None
    return [(item.id, text) for item, text in zip(items, get_texts(items), strict=True)]


async def test_items_of_concurrent_responses_are_stored_once(harness: EngineHarness, options: dict[str, Any]) -> None:
    first = await harness.answer("hello")
    conversation = await converse(harness)
    brought = [say("mine", "msg_mine"), refer(first.output[0].id)]
    responses = await answer_at_once(harness, [brought, brought], conversation=conversation, **options)
    assert [response.status for response in responses] == ["completed", "completed"]
    all_items = await list_items(harness, conversation)
    assert all_items[:2] == [("msg_mine", "mine"), (first.output[0].id, "1 items")]
    assert [text for _, text in all_items[2:]] == ["wait", "Half", "wait", "Half"]


async def test_conflicting_message_id_gets_a_new_id(harness: EngineHarness, options: dict[str, Any]) -> None:
    conversation = await converse(harness)
    brought = [[say("one", "msg_mine")], [say("two", "msg_mine")]]
    responses = await answer_at_once(harness, brought, conversation=conversation, **options)
    assert [response.status for response in responses] == ["completed", "completed"]
    all_items = await list_items(harness, conversation)
    assert sorted(text for _, text in all_items) == ["Half", "Half", "one", "two", "wait", "wait"]
    assert [item_id for item_id, text in all_items if text in ("one", "two")] == ["msg_mine", "msg_mine_2"]


async def test_answers_with_one_id_are_all_stored(harness: EngineHarness) -> None:
    conversation = await converse(harness)
    answers = [await harness.answer("foreign", conversation=conversation) for _ in range(3)]
    assert [answer.output[0].id for answer in answers] == ["msg_foreign1"] * 3
    all_items = await list_items(harness, conversation)
    assert [item_id for item_id, text in all_items if text != "foreign"] == [
        "msg_foreign1",
        "msg_foreign1_2",
        "msg_foreign1_3",
    ]


async def test_continuing_a_concurrent_response_reads_items_once(harness: EngineHarness) -> None:
    conversation = await converse(harness, "My name is Ada.")
    brought = [[say("mine", "msg_mine")]] * 2
    await answer_at_once(harness, brought, conversation=conversation)
    stored_items = await harness.store.load_conversation_items("default", conversation)
    assert stored_items is not None
    second = parse_response_id(str(stored_items[-1].id))
    await harness.answer("later", conversation=conversation)
    assert await read(harness, str(second)) == (["My name is Ada.", "mine", "wait", "Half", "wait", "Half"], [])


async def test_bare_reasoning_is_loaded_by_its_id(make_harness: Any) -> None:
    harness = await make_harness({"default": [{"reasoning": "Because."}, {"text": "So."}]})
    first = await harness.answer("why?")
    rest = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "and?"}]
    second = await harness.answer([think(first.output[0].id), *rest])
    assert (await requested_with(harness, second.id))[0] == first.output[0]


@pytest.mark.parametrize("status", [None, "completed", "failed"])
async def test_bare_image_is_loaded_by_its_id_unless_it_failed(make_harness: Any, status: str | None) -> None:
    image = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="}
    harness = await make_harness({"default": [{"item": image}, {"text": "Drawn."}]})
    first = await (await harness.ask("draw")).drain()
    sent = {"type": "image_generation_call", "id": first.output[0].id} | ({"status": status} if status else {})
    second = await (await harness.ask([sent, say("and?")])).drain()
    found = (await requested_with(harness, second.id))[0]
    assert (found.id, found.result) == (first.output[0].id, None if status == "failed" else "aGk=")


@pytest.mark.parametrize("item_id", ["rs_1", "msg_mine"])
async def test_bare_reasoning_is_not_replaced_by_another_type(harness: EngineHarness, item_id: str) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    await harness.answer([say("hello", "msg_mine"), thought, {"role": "assistant", "content": "So."}, say("and?")])
    second = await harness.answer([think(item_id), {"role": "assistant", "content": "So."}, say("and?")])
    assert (await requested_with(harness, second.id))[0] == Reasoning(id=item_id, status="completed")


def think(item_id: str | None) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": []}


async def requested_with(harness: EngineHarness, response_id: str) -> list[Item | Unknown]:
    stored_items = await harness.store.load("default", response_id)
    assert stored_items is not None
    return stored_items.input


# Calls whose ids come again


CALL = {"tool_call": {"name": "f", "arguments": {}, "call_id": "call_0"}}
LOOP = {
    "rules": [
        {"last_item": "function_call_output", "answers": ["{history} items"]},
        {"user": "say so", "answers": [[CALL, {"text": "I did."}]]},
    ],
    "default": [CALL],
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def make_output(text: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": "call_0", "output": text}


async def test_whole_history_with_reused_call_ids_can_be_sent_again(make_harness: Any) -> None:
    harness = await make_harness(LOOP)
    sent: list[Any] = []
    previous = None
    for step in range(3):
        sent_input = await harness.answer([*sent, say(f"go {step}", f"msg_{step}")], previous_response_id=previous)
        sent += [say(f"go {step}", f"msg_{step}"), *sent_input.output, make_output(f"out {step}")]
        done = await harness.answer(sent, previous_response_id=sent_input.id)
        assert done.output_text == f"{4 * step + 3} items"
        sent += done.output
        previous = done.id


async def test_call_without_its_deleted_output_does_not_take_another(make_harness: Any) -> None:
    harness = await make_harness(LOOP)
    conversation = await converse(harness)
    options = {"conversation": conversation, "tools": [FUNCTION]}
    await harness.answer("go", **options)
    await harness.answer([{**make_output("first"), "id": "fco_1"}], **options)
    await harness.engine.conversations.delete_item("default", conversation, "fco_1")
    await harness.answer("again", **options)
    run = await harness.ask([make_output("second")], **options)
    assert run.warnings == ["history: the call call_0 had no output and got a note instead"]
    assert (await run.drain()).output_text == "7 items"


async def test_call_pair_in_the_input_answers_no_call_of_the_history(make_harness: Any) -> None:
    harness = await make_harness(LOOP)
    call = {"type": "function_call", "call_id": "call_0", "name": "f"}
    lost = [say("go"), call | {"arguments": "{}"}, {"type": "message", "role": "assistant", "content": "I did."}]
    created = await harness.engine.conversations.create("default", codec.decode_items(codec.encode(lost)), None)
    pair = [call | {"arguments": "[]"}, make_output("mine")]
    response = await harness.answer([say("rather"), *pair], conversation=created.id)
    assert response.output_text == "7 items"


@pytest.mark.parametrize("following", [[], [{"type": "message", "role": "assistant", "content": "I did."}]])
async def test_call_before_a_text_of_the_previous_response_needs_an_output(
    make_harness: Any, following: list[dict[str, Any]]
) -> None:
    harness = await make_harness(LOOP)
    opened = await harness.answer("go and say so", tools=[FUNCTION])
    with pytest.raises(InvalidRequest, match="No tool output found for function call call_0"):
        await harness.answer([*following, say("rather")], previous_response_id=opened.id)


async def test_call_before_a_text_can_be_answered_after_a_compaction(make_harness: Any) -> None:
    harness = await make_harness(LOOP)
    opened = await harness.answer("go and say so", tools=[FUNCTION])
    compacted = await harness.answer([{"type": "compaction_trigger"}], previous_response_id=opened.id)
    response = await harness.answer([make_output("mine")], previous_response_id=compacted.id)
    assert response.output_text == "4 items"


async def test_local_shell_outputs_with_one_call_id_are_all_stored(harness: EngineHarness) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    call = {"type": "local_shell_call", "call_id": "call_0", "action": action, "status": "completed"}
    plain = {"type": "local_shell_call_output", "id": "call_0"}
    conversation = await converse(harness)
    for step in range(2):
        pair = [{**call, "id": f"lsh_{step}"}, {**plain, "output": f"out {step}"}]
        await harness.answer(pair, conversation=conversation)
    items = await harness.store.load_conversation_items("default", conversation)
    assert items is not None
    outputs = [item for item in items if isinstance(item, LocalShellCallOutput)]
    assert [(item.call_id, item.output) for item in outputs] == [("call_0", "out 0"), ("call_0", "out 1")]
    again = codec.decode_items(codec.encode(items))
    copied = await harness.engine.conversations.create("default", again, None)
    assert await harness.store.load_conversation_items("default", copied.id) == items


async def test_conversation_of_too_large_references_is_refused_with_its_field(make_harness: Any) -> None:
    harness: EngineHarness = await make_harness(SCRIPT, history_budget_bytes=1_000_000)
    conversations = harness.engine.conversations
    large = await conversations.create("default", [Message("user", "x" * 1_000_000, "msg_large")], None)
    items = [ItemReference("msg_large")]
    for work in (conversations.create("default", items, None), conversations.add_items("default", large.id, items)):
        with pytest.raises(InvalidRequest) as caught:
            await work
        assert (caught.value.param, caught.value.code) == ("items", "history_too_large")
