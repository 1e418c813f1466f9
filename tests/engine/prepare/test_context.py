"""What a request builds on: items that references name, and the conversation in which a chain began."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.prepare.history import load_history
from antiphon.engine.sealing import Sealer
from antiphon.errors import NotFound
from antiphon.protocol import codec
from antiphon.protocol.content import extract_text
from antiphon.protocol.hosted import LocalShellCallOutput
from antiphon.protocol.items import Item, Message, Reasoning
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import parse_response_id
from antiphon.store.location import locate_store
from antiphon.store.sqlite.store import SqliteStore
from antiphon.stream.fold import fold
from support.engine_harness import Bench

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
async def bench(request: pytest.FixtureRequest, tmp_path: Path, make_bench: Any) -> Bench:
    url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/store.db"}[request.param]
    made: Bench = await make_bench(SCRIPT, store=locate_store(url))
    return made


def say(text: str, item_id: str | None = None) -> dict[str, Any]:
    message = {"type": "message", "role": "user", "content": text}
    return message if item_id is None else message | {"id": item_id}


def refer(item_id: str | None) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def tell(items: list[Item | Unknown]) -> list[str]:
    return [extract_text(item.content) for item in items if isinstance(item, Message)]


async def resolve(bench: Bench, item_id: str | None, *, project: str = "default") -> str:
    """What the item says that a reference to this id puts in its place."""
    response = await bench.answer([refer(item_id), say("and?")], project=project)
    page = await bench.engine.input_items(project, response.id, after=None, limit=9, order="asc")
    assert [page.data[0].id, response.output_text] == [item_id, "2 items"]
    return tell(page.data)[0]


# References


async def test_a_reference_finds_an_item_that_the_client_has_named(bench: Bench) -> None:
    await bench.answer([say("hello", "msg_mine")])
    assert await resolve(bench, "msg_mine") == "hello"


async def test_a_reference_finds_an_item_that_the_backend_has_named(bench: Bench) -> None:
    await bench.answer("foreign")
    assert await resolve(bench, "msg_foreign1") == "I come from elsewhere."


async def test_a_reference_finds_an_unstored_answer_in_the_input_of_a_stored_response(bench: Bench) -> None:
    unstored = await bench.answer("hello", store=False)
    await bench.answer([*unstored.output, say("and?")])
    assert await resolve(bench, unstored.output[0].id) == "1 items"


async def test_what_was_made_in_a_stored_response_goes_with_it_though_it_was_sent_again(bench: Bench) -> None:
    first = await bench.answer("hello")
    second = await bench.answer([refer(first.output[0].id), say("and?")])
    await bench.engine.delete("default", first.id)
    with pytest.raises(NotFound):
        await bench.ask([refer(first.output[0].id)])
    kept = await bench.engine.retrieve("default", second.id)
    assert kept == second


async def test_a_reference_finds_nothing_when_every_response_with_the_item_is_gone(bench: Bench) -> None:
    responses = [await bench.answer([say("hello", "msg_mine")]) for _ in range(2)]
    for response in responses:
        await bench.engine.delete("default", response.id)
    with pytest.raises(NotFound) as caught:
        await bench.ask([refer("msg_mine")])
    assert caught.value.param == "input[0]"


async def test_a_reference_finds_the_item_of_a_response_that_still_runs(bench: Bench) -> None:
    running = (await bench.ask([say("wait", "msg_mine")], background=True)).response
    await bench.backend.reached("gate")
    conversation = await bench.engine.conversations.create("default", codec.decode_items(b'[{"id":"msg_mine"}]'), None)
    listed = await bench.store.conversation_items("default", conversation.id)
    assert listed is not None
    assert tell(listed) == ["wait"]
    await bench.engine.cancel("default", running.id)


async def test_a_reference_does_not_reach_into_another_project(bench: Bench) -> None:
    await bench.answer([say("hello", "msg_mine")], project="theirs")
    await bench.answer("foreign", project="theirs")
    for item_id in ("msg_mine", "msg_foreign1"):
        with pytest.raises(NotFound):
            await bench.ask([refer(item_id)])
    assert await resolve(bench, "msg_mine", project="theirs") == "hello"


async def test_items_made_in_their_response_need_no_note(make_bench: Any, tmp_path: Path) -> None:
    bench = await make_bench(SCRIPT, store=SqliteStore(tmp_path / "store.db"))
    first = await bench.answer("hello")
    second = await bench.answer([say("and?"), say("well?")], previous_response_id=first.id)
    kept = await bench.store.load("default", second.id)
    assert kept is not None
    items = [*kept.input, *kept.response.output]
    assert [await bench.store.find_item("default", item.id) for item in items] == [None] * 3
    assert await resolve(bench, kept.input[0].id) == "and?"


# A chain that begins in a conversation


async def converse(bench: Bench, *texts: str) -> str:
    items = codec.decode_items(codec.encode([say(text) for text in texts]))
    return (await bench.engine.conversations.create("default", items, None)).id


async def read(bench: Bench, response_id: str) -> tuple[list[str], list[str]]:
    """What a continuation reads, and what is mended for it."""
    context = await load_history(
        CreateRequest(input="and?", previous_response_id=response_id),
        project="default",
        store=bench.store,
        sealer=Sealer([bytes(32)]),
        inherit_tools=False,
    )
    return tell(context.items), context.repairs


async def test_what_continues_a_response_of_a_conversation_reads_what_that_held_before_it(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    await bench.answer("one", conversation=conversation)
    second = await bench.answer("two", conversation=conversation)
    await bench.answer("later", conversation=conversation)
    third = await bench.answer("three", previous_response_id=second.id)
    fourth = await bench.answer("four", previous_response_id=third.id)
    assert [third.output_text, fourth.output_text] == ["6 items", "8 items"]
    before = ["My name is Ada.", "one", "2 items", "two", "4 items"]
    assert await read(bench, second.id) == (before, [])
    assert await read(bench, fourth.id) == ([*before, "three", "6 items", "four", "8 items"], [])


async def test_what_continues_the_first_response_of_a_conversation_reads_it_once(bench: Bench) -> None:
    conversation = await converse(bench)
    first = await bench.answer([say("one", "msg_mine")], conversation=conversation)
    assert await read(bench, first.id) == (["one", "1 items"], [])


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
async def test_a_response_that_is_no_part_of_its_conversation_comes_after_all_of_it(bench: Bench, ending: str) -> None:
    conversation = await converse(bench, "My name is Ada.")
    if ending == "failed":
        broken = await bench.answer("fail", conversation=conversation)
    else:
        broken = (await bench.ask("wait", conversation=conversation, background=True)).response
        await bench.backend.reached("gate")
        broken = await bench.engine.cancel("default", broken.id)
    await bench.answer("one", conversation=conversation)
    asked = {"failed": "fail", "cancelled": "wait"}[ending]
    assert broken.status == ending
    assert await read(bench, broken.id) == (["My name is Ada.", "one", "2 items", asked, "Half"], [])


async def test_what_was_taken_out_of_the_conversation_does_not_move_its_end(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    first = await bench.answer([say("one", "msg_mine"), say("two")], conversation=conversation)
    await bench.engine.conversations.delete_item("default", conversation, "msg_mine")
    await bench.answer("later", conversation=conversation)
    assert await read(bench, first.id) == (["My name is Ada.", "one", "two", "3 items"], [])


async def test_a_response_whose_items_were_all_taken_out_keeps_its_place_in_the_conversation(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    first = await bench.answer([say("one", "msg_mine")], conversation=conversation)
    for item_id in ("msg_mine", str(first.output[0].id)):
        await bench.engine.conversations.delete_item("default", conversation, item_id)
    await bench.answer("later", conversation=conversation)
    assert await read(bench, first.id) == (["My name is Ada.", "one", "2 items"], [])


async def test_a_response_without_items_has_a_place_in_the_conversation(make_bench: Any) -> None:
    bench = await make_bench({"rules": [{"user": "Ada", "answers": [[]]}], "default": "{history} items"})
    conversation = await converse(bench, "My name is Ada.")
    silent = await bench.answer([], conversation=conversation)
    await bench.answer("later", conversation=conversation)
    assert silent.output == []
    assert await read(bench, silent.id) == (["My name is Ada."], [])


async def test_a_chain_whose_conversation_is_gone_goes_on_and_says_so(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    first = await bench.answer("one", conversation=conversation)
    await bench.engine.conversations.delete("default", conversation)
    run = await bench.ask("two", previous_response_id=first.id)
    assert run.warnings == [f"history: the conversation {conversation} was deleted, with its items before {first.id}"]
    assert (await run.drain()).output_text == "3 items"


async def test_a_chain_of_another_project_does_not_reach_into_a_conversation(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    first = await bench.answer("one", conversation=conversation)
    kept = await bench.store.load("default", first.id)
    assert kept is not None
    await bench.store.save("theirs", kept)
    continued = await bench.answer("two", project="theirs", previous_response_id=first.id)
    assert continued.output_text == "3 items"


# Two that bring the same to one conversation


@pytest.fixture(params=[{}, {"background": True}, {"store": False}], ids=["stored", "background", "unstored"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


async def answer_at_once(bench: Bench, asked: list[list[Any]], **options: Any) -> list[Response]:
    """What is answered to each, when all are under way before the first has ended."""

    async def answer(each: list[Any]) -> Response:
        run = await bench.ask([*each, say("wait")], **options)
        told = [event async for batch in run.events() for event in batch]
        # A background response is told from the log.
        return fold(codec.decode_event(event.raw) if isinstance(event, Unknown) else event for event in told)

    answers = asyncio.gather(*map(answer, asked))
    for _ in asked:
        await bench.backend.reached("gate")
    for _ in asked:
        bench.backend.release("gate")
    return await answers


async def list_told(bench: Bench, conversation: str) -> list[tuple[str | None, str]]:
    items = await bench.store.conversation_items("default", conversation)
    assert items is not None
    return [(item.id, text) for item, text in zip(items, tell(items), strict=True)]


async def test_what_two_responses_bring_at_once_is_kept_once(bench: Bench, options: dict[str, Any]) -> None:
    first = await bench.answer("hello")
    conversation = await converse(bench)
    brought = [say("mine", "msg_mine"), refer(first.output[0].id)]
    responses = await answer_at_once(bench, [brought, brought], conversation=conversation, **options)
    assert [response.status for response in responses] == ["completed", "completed"]
    told = await list_told(bench, conversation)
    assert told[:2] == [("msg_mine", "mine"), (first.output[0].id, "1 items")]
    assert [text for _, text in told[2:]] == ["wait", "Half", "wait", "Half"]


async def test_another_message_under_an_id_that_was_free_at_first_is_kept_under_a_new_one(
    bench: Bench, options: dict[str, Any]
) -> None:
    conversation = await converse(bench)
    brought = [[say("one", "msg_mine")], [say("two", "msg_mine")]]
    responses = await answer_at_once(bench, brought, conversation=conversation, **options)
    assert [response.status for response in responses] == ["completed", "completed"]
    told = await list_told(bench, conversation)
    assert sorted(text for _, text in told) == ["Half", "Half", "one", "two", "wait", "wait"]
    assert [item_id for item_id, text in told if text in ("one", "two")] == ["msg_mine", "msg_mine_2"]


async def test_answers_that_all_have_one_id_are_all_kept(bench: Bench) -> None:
    conversation = await converse(bench)
    answers = [await bench.answer("foreign", conversation=conversation) for _ in range(3)]
    assert [answer.output[0].id for answer in answers] == ["msg_foreign1"] * 3
    told = await list_told(bench, conversation)
    assert [item_id for item_id, text in told if text != "foreign"] == [
        "msg_foreign1",
        "msg_foreign1_2",
        "msg_foreign1_3",
    ]


async def test_what_continues_the_second_of_two_that_brought_the_same_reads_it_once(bench: Bench) -> None:
    conversation = await converse(bench, "My name is Ada.")
    brought = [[say("mine", "msg_mine")]] * 2
    await answer_at_once(bench, brought, conversation=conversation)
    kept = await bench.store.conversation_items("default", conversation)
    assert kept is not None
    second = parse_response_id(str(kept[-1].id))
    await bench.answer("later", conversation=conversation)
    assert await read(bench, str(second)) == (["My name is Ada.", "mine", "wait", "Half", "wait", "Half"], [])


async def test_reasoning_of_which_a_client_kept_only_the_summary_is_found_by_its_id(make_bench: Any) -> None:
    bench = await make_bench({"default": [{"reasoning": "Because."}, {"text": "So."}]})
    first = await bench.answer("why?")
    rest = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "and?"}]
    second = await bench.answer([think(first.output[0].id), *rest])
    assert (await asked_with(bench, second.id))[0] == first.output[0]


@pytest.mark.parametrize("item_id", ["rs_1", "msg_mine"])
async def test_what_else_has_the_id_that_a_client_gives_its_reasoning_does_not_take_its_place(
    bench: Bench, item_id: str
) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    await bench.answer([say("hello", "msg_mine"), thought, {"role": "assistant", "content": "So."}, say("and?")])
    second = await bench.answer([think(item_id), {"role": "assistant", "content": "So."}, say("and?")])
    assert (await asked_with(bench, second.id))[0] == Reasoning(id=item_id, status="completed")


def think(item_id: str | None) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": []}


async def asked_with(bench: Bench, response_id: str) -> list[Item | Unknown]:
    kept = await bench.store.load("default", response_id)
    assert kept is not None
    return kept.input


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


def tell_output(text: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": "call_0", "output": text}


async def test_the_whole_history_may_be_sent_again_though_the_ids_of_its_calls_repeat(make_bench: Any) -> None:
    bench = await make_bench(LOOP)
    sent: list[Any] = []
    previous = None
    for step in range(3):
        asked = await bench.answer([*sent, say(f"go {step}", f"msg_{step}")], previous_response_id=previous)
        sent += [say(f"go {step}", f"msg_{step}"), *asked.output, tell_output(f"out {step}")]
        done = await bench.answer(sent, previous_response_id=asked.id)
        assert done.output_text == f"{4 * step + 3} items"
        sent += done.output
        previous = done.id


async def test_a_call_whose_output_was_taken_out_does_not_stand_in_for_a_later_one(make_bench: Any) -> None:
    bench = await make_bench(LOOP)
    conversation = await converse(bench)
    options = {"conversation": conversation, "tools": [FUNCTION]}
    await bench.answer("go", **options)
    await bench.answer([{**tell_output("first"), "id": "fco_1"}], **options)
    await bench.engine.conversations.delete_item("default", conversation, "fco_1")
    await bench.answer("again", **options)
    run = await bench.ask([tell_output("second")], **options)
    assert run.warnings == ["history: the call call_0 had no output and got a note instead"]
    assert (await run.drain()).output_text == "7 items"


async def test_an_input_with_a_call_and_its_output_answers_no_open_call_of_the_history(make_bench: Any) -> None:
    bench = await make_bench(LOOP)
    opened = await bench.answer("go and say so", tools=[FUNCTION])
    pair = [{"type": "function_call", "call_id": "call_0", "name": "f", "arguments": "[]"}, tell_output("mine")]
    response = await bench.answer([say("rather"), *pair], previous_response_id=opened.id)
    assert response.output_text == "7 items"


async def test_the_outputs_of_a_local_shell_each_have_a_place_though_their_calls_share_an_id(bench: Bench) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    call = {"type": "local_shell_call", "call_id": "call_0", "action": action, "status": "completed"}
    plain = {"type": "local_shell_call_output", "id": "call_0"}
    conversation = await converse(bench)
    for step in range(2):
        pair = [{**call, "id": f"lsh_{step}"}, {**plain, "output": f"out {step}"}]
        await bench.answer(pair, conversation=conversation)
    items = await bench.store.conversation_items("default", conversation)
    assert items is not None
    outputs = [item for item in items if isinstance(item, LocalShellCallOutput)]
    assert [(item.call_id, item.output) for item in outputs] == [("call_0", "out 0"), ("call_0", "out 1")]
    again = codec.decode_items(codec.encode(items))
    copied = await bench.engine.conversations.create("default", again, None)
    assert await bench.store.conversation_items("default", copied.id) == items
