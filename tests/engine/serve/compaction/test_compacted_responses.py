"""Compaction in responses: by threshold and trigger, along a chain, and in the background."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.respond.connection_memory import ConnectionMemory
from antiphon.errors import ContextLengthExceeded, InvalidRequest
from antiphon.protocol import codec, events
from antiphon.protocol.items import Compaction
from antiphon.protocol.response import Response
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge

NOTES = "Goal: a red bridge."
SUMMARISER = {"text": "You write the notes", "answers": [NOTES]}
SCRIPT = {
    "rules": [
        SUMMARISER,
        {"user": "recall", "text": NOTES, "answers": ["It was to be red."]},
        {"user": "recall", "answers": ["I do not know."]},
        {"user": "count", "answers": ["{history}"]},
    ]
}
RULE = {"role": "developer", "content": "Be kind."}
HISTORY: list[Any] = [
    RULE,
    {"role": "user", "content": "Build a bridge."},
    *(
        item
        for number in range(30)
        for item in (
            {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": "steel " * 60},
            {"role": "assistant", "content": f"Beam {number} is set."},
        )
    ),
]
THRESHOLD = {"context_management": [{"type": "compaction", "compact_threshold": 400}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def wire(response: Response) -> list[Any]:
    output: list[Any] = json.loads(codec.encode(response.output))
    return output


@pytest.fixture
async def harness(make_harness: Any) -> EngineHarness:
    made: EngineHarness = await make_harness(SCRIPT)
    return made


# Thresholds


async def test_compaction_precedes_the_answer_above_the_threshold(harness: EngineHarness) -> None:
    run = await harness.ask([*HISTORY, user("recall")], **THRESHOLD)
    reported = [event async for batch in run.events() for event in batch]
    assert [event.type for event in reported[:6]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.output_item.added",
    ]
    added, done = reported[2], reported[4]
    assert isinstance(added, events.OutputItemAdded)
    assert isinstance(done, events.OutputItemDone)
    assert json.loads(codec.encode(reported[3])) == {
        "type": "response.compaction.compacting",
        "sequence_number": 3,
        "output_index": 0,
        "item_id": added.item.id,
    }
    assert added.item == Compaction("", done.item.id)
    response = judge(reported)
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert response.output[0] == done.item
    assert (response.status, response.output_text) == ("completed", "It was to be red.")
    assert str(done.item.id).startswith("cmp_")


async def test_turn_below_the_threshold_is_not_compacted(harness: EngineHarness) -> None:
    plain = await harness.answer([*HISTORY, user("recall")])
    threshold = {"context_management": [{"type": "compaction", "compact_threshold": 100_000}]}
    response = await harness.answer([*HISTORY, user("recall")], **threshold)
    assert [item.type for item in response.output] == ["message"]
    assert response.usage == plain.usage


async def test_default_threshold_comes_from_the_window(harness: EngineHarness) -> None:
    rule = {"context_management": [{"type": "compaction"}]}
    assert [item.type for item in (await harness.answer("hi", **rule)).output] == ["message"]
    huge = [*HISTORY, {"role": "assistant", "content": "word " * 110_000}, user("recall")]
    response = await harness.answer(huge, **rule)
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert response.output_text == "It was to be red."


async def test_usage_includes_the_summary_tokens(harness: EngineHarness) -> None:
    compacted = await harness.answer([*HISTORY, user("recall")], store=False, **THRESHOLD)
    after = await harness.answer([RULE, *wire(compacted)[:1], user("recall")], store=False)
    assert compacted.usage is not None
    assert after.usage is not None
    assert compacted.usage.output_tokens == after.usage.output_tokens + len(NOTES.split())
    assert compacted.usage.input_tokens > after.usage.input_tokens


async def test_chain_continues_from_its_compaction(harness: EngineHarness) -> None:
    first = await harness.answer([*HISTORY, user("recall")], **THRESHOLD)
    second = await harness.answer("recall", previous_response_id=first.id)
    assert second.output_text == "It was to be red."
    counted = await harness.answer("count", previous_response_id=second.id)
    assert int(counted.output_text) < 20


async def test_chain_is_compacted_repeatedly(harness: EngineHarness) -> None:
    previous = (await harness.answer(HISTORY, **THRESHOLD)).id
    for _ in range(3):
        more = [{"role": "assistant", "content": "word " * 600}, user("recall")]
        response = await harness.answer(more, previous_response_id=previous, **THRESHOLD)
        assert [item.type for item in response.output] == ["compaction", "message"]
        assert response.output_text == "It was to be red."
        previous = response.id
    assert int((await harness.answer("count", previous_response_id=previous)).output_text) < 20


async def test_unreachable_threshold_does_not_compact_every_turn(harness: EngineHarness) -> None:
    rules = {"instructions": "word " * 1000}
    previous = (await harness.answer([*HISTORY, user("recall")], **THRESHOLD, **rules)).id
    turns: list[list[str]] = []
    for text in ("short", "short", "long " * 300, "short"):
        response = await harness.answer(
            [user(text), user("recall")], previous_response_id=previous, **THRESHOLD, **rules
        )
        turns.append([item.type for item in response.output])
        previous = response.id
    assert turns == [["message"], ["message"], ["compaction", "message"], ["message"]]


async def test_conversation_continues_from_its_compaction(harness: EngineHarness) -> None:
    conversation = (await harness.engine.conversations.create("default", items=[], metadata=None)).id
    await harness.answer([*HISTORY, user("recall")], conversation=conversation, **THRESHOLD)
    answer = await harness.answer("recall", conversation=conversation)
    assert answer.output_text == "It was to be red."
    assert int((await harness.answer("count", conversation=conversation)).output_text) < 20


async def test_deleting_a_covered_item_has_no_effect(harness: EngineHarness) -> None:
    """Covered items are not repaired, even if half of a pair was deleted."""
    conversation = (await harness.engine.conversations.create("default", items=[], metadata=None)).id
    await harness.answer([*HISTORY, user("recall")], conversation=conversation, **THRESHOLD)
    listed = await harness.engine.conversations.list_items("default", conversation, after=None, limit=9, order="asc")
    output = next(item for item in listed.data if item.type == "function_call_output")
    await harness.engine.conversations.delete_item("default", conversation, str(output.id))
    assert (await harness.answer("recall", conversation=conversation)).output_text == "It was to be red."


async def test_compaction_comes_before_truncation(harness: EngineHarness) -> None:
    response = await harness.answer([*HISTORY, user("recall")], truncation="auto", **THRESHOLD)
    assert (response.output[0].type, response.output_text) == ("compaction", "It was to be red.")


async def test_response_continues_with_extracts_without_a_summary(make_harness: Any) -> None:
    script = {"rules": [{"text": "You write the notes", "answers": [[{"crash": "boom"}]]}, *SCRIPT["rules"][2:]]}
    harness = await make_harness(script)
    response = await harness.answer([*HISTORY, user("count")], **THRESHOLD)
    assert (response.status, response.output[0].type) == ("completed", "compaction")


async def test_failure_after_a_compaction_includes_the_compaction(make_harness: Any) -> None:
    failing = {"user": "fail", "answers": [[{"raise": {"message": "No.", "status": 400, "code": "no"}}]]}
    harness = await make_harness({"rules": [SUMMARISER, failing]})
    response = await harness.answer([*HISTORY, user("fail")], **THRESHOLD)
    assert response.error is not None
    assert (response.status, response.error.code) == ("failed", "no")
    assert [item.type for item in response.output] == ["compaction"]


async def test_cancelled_compaction_is_an_empty_item(make_harness: Any) -> None:
    gate = {"text": "You write the notes", "answers": [[{"wait": "gate"}, {"text": NOTES}]]}
    harness = await make_harness({"rules": [gate]})
    run = await harness.ask([*HISTORY, user("hi")], **THRESHOLD)
    reading = asyncio.ensure_future(run.drain())
    await harness.backend.reached("gate")
    cancelled = await harness.engine.cancel("default", run.response.id)
    await reading
    assert (cancelled.status, cancelled.output) == ("cancelled", [Compaction("", cancelled.output[0].id)])
    again = await harness.ask("hi", previous_response_id=cancelled.id)
    assert ((await again.drain()).status, again.warnings) == ("completed", [])


async def test_too_long_instructions_are_refused_before_the_first_event(harness: EngineHarness) -> None:
    endless = [{"role": "system", "content": "word " * 130_000}, user("hi")]
    with pytest.raises(ContextLengthExceeded, match="leaves no room for a conversation"):
        await harness.ask(endless, **THRESHOLD)


# Triggers


@pytest.mark.parametrize("store", [True, False])
async def test_trigger_is_answered_with_exactly_one_compaction(harness: EngineHarness, store: bool) -> None:
    response = await harness.answer([*HISTORY, {"type": "compaction_trigger"}], store=store)
    assert (response.status, [item.type for item in response.output]) == ("completed", ["compaction"])
    after = await harness.answer([RULE, *wire(response), user("recall")])
    assert after.status == "completed"


async def test_trigger_compacts_the_previous_response(harness: EngineHarness) -> None:
    first = await harness.answer([*HISTORY, user("hi")])
    trigger = [{"type": "compaction_trigger"}]
    compacted = await harness.answer(trigger, previous_response_id=first.id)
    assert [item.type for item in compacted.output] == ["compaction"]
    listed = await harness.engine.input_items("default", compacted.id, after=None, limit=9, order="asc")
    assert [item.type for item in listed.data] == ["compaction_trigger"]
    after = await harness.answer("count", previous_response_id=compacted.id)
    # Everything had room, so nothing is lost: the rule, the task, 90 steps, a question and its answer, and this one.
    assert int(after.output_text) == len(HISTORY) + 3


async def test_trigger_without_history_is_answered(harness: EngineHarness) -> None:
    response = await harness.answer([{"type": "compaction_trigger"}])
    assert [item.type for item in response.output] == ["compaction"]
    assert (await harness.answer([*wire(response), user("count")])).output_text == "1"


async def test_trigger_before_the_end_is_refused(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await harness.ask([{"type": "compaction_trigger"}, user("hi")])
    assert (caught.value.param, caught.value.code) == ("input[0]", "invalid_value")


async def test_calls_without_outputs_can_be_compacted(harness: EngineHarness) -> None:
    call = {"type": "function_call", "call_id": "open", "name": "look", "arguments": "{}"}
    response = await harness.answer([*HISTORY, call, {"type": "compaction_trigger"}])
    output = {"type": "function_call_output", "call_id": "open", "output": "found"}
    assert (await harness.answer([*wire(response), output])).status == "completed"


@pytest.mark.parametrize("chained", [True, False])
async def test_compacted_call_without_an_output_does_not_block(harness: EngineHarness, chained: bool) -> None:
    """The call is sealed, so no client could mend it."""
    call = {"type": "function_call", "call_id": "open", "name": "look", "arguments": "{}"}
    compacted = await harness.answer([*HISTORY, call, {"type": "compaction_trigger"}])
    before: list[Any] = [] if chained else [RULE, *wire(compacted)]
    chain = {"previous_response_id": compacted.id} if chained else {}
    run = await harness.ask([*before, user("count")], **chain)
    first = await run.drain()
    assert int(first.output_text) == len(HISTORY) + 3
    assert run.warnings == ["history: the call open had no output and got a note instead"]
    output = {"type": "function_call_output", "call_id": "open", "output": "found"}
    late = await harness.ask([*before, output, user("count")], **chain)
    assert ((await late.drain()).output_text, late.warnings) == (first.output_text, [])


# Items that come back


async def test_call_id_can_be_reused_after_a_compaction(make_harness: Any) -> None:
    again = [{"tool_call": {"name": "look", "arguments": "{}", "call_id": "c0"}}]
    looked = {"last_item": "function_call_output", "answers": [again, "Done."]}
    harness = await make_harness({"rules": [SUMMARISER, looked]})
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    first = await harness.answer(HISTORY[:-1], tools=tools, **THRESHOLD)
    assert [item["type"] for item in wire(first)] == ["compaction", "function_call"]
    output = {"type": "function_call_output", "call_id": "c0", "output": "it is iron"}
    assert (await harness.answer([output], previous_response_id=first.id)).output_text == "Done."


@pytest.mark.parametrize("broken", ["of another server", "tampered with"])
async def test_unreadable_compaction_in_the_input_is_dropped_with_a_warning(
    harness: EngineHarness, broken: str
) -> None:
    (item,) = wire(await harness.answer([*HISTORY, {"type": "compaction_trigger"}]))
    changed = item | {"encrypted_content": broken if broken[0] == "o" else item["encrypted_content"][:-8] + "AAAAAAAA"}
    run = await harness.ask([user("Build."), changed, user("count")])
    assert (await run.drain()).output_text == "2"
    assert run.warnings == [
        f"history: compaction {item['id']}: its encrypted_content cannot be opened here and was left out"
    ]


async def test_compaction_of_another_project_is_dropped(harness: EngineHarness) -> None:
    (item,) = wire(await harness.answer([*HISTORY, {"type": "compaction_trigger"}]))
    run = await harness.ask([item, user("count")], project="another")
    assert ((await run.drain()).output_text, len(run.warnings)) == ("1", 1)


async def test_whole_history_sent_with_the_chain_is_not_doubled(harness: EngineHarness) -> None:
    first = await harness.answer([*HISTORY, user("recall")], **THRESHOLD)
    sent_input = await harness.engine.input_items("default", first.id, after=None, limit=100, order="asc")
    whole = [*json.loads(codec.encode(sent_input.data)), *wire(first)]
    alone = await harness.answer("count", previous_response_id=first.id)
    again = await harness.answer([*whole, user("count")], previous_response_id=first.id)
    stateless = await harness.answer([*whole, user("count")])
    assert alone.output_text == again.output_text == stateless.output_text


async def test_input_tokens_count_the_compaction_content(harness: EngineHarness) -> None:
    compacted = await harness.answer([*HISTORY, user("recall")], **THRESHOLD)
    request = codec.decode_request(
        codec.encode({"model": "scripted", "input": "recall", "previous_response_id": compacted.id})
    ).body
    counted, _ = await harness.engine.count_input_tokens(request, project="default")
    answered = await harness.answer("recall", previous_response_id=compacted.id)
    assert answered.usage is not None
    assert counted == answered.usage.input_tokens


async def test_websocket_session_continues_from_its_compaction(harness: EngineHarness) -> None:
    memory = ConnectionMemory()

    async def say(sent_input: Any, **fields: Any) -> Response:
        body = codec.encode({"model": "scripted", "input": sent_input, "store": False} | fields)
        run = await harness.engine.create(codec.decode_request(body).body, project="default", memory=memory)
        return await run.drain()

    first = await say([*HISTORY, user("recall")], **THRESHOLD)
    second = await say("recall", previous_response_id=first.id)
    counted = await say("count", previous_response_id=second.id)
    alone = await harness.answer([RULE, *wire(first), user("recall"), *wire(second), user("count")])
    assert (second.output_text, counted.output_text) == ("It was to be red.", alone.output_text)


# In the background


async def test_background_response_is_compacted_too(harness: EngineHarness) -> None:
    run = await harness.ask([*HISTORY, user("recall")], background=True, **THRESHOLD)
    response = await read(harness, run.response.id)
    assert [item.type for item in response.output] == ["compaction", "message"]
    trigger = await harness.ask([{"type": "compaction_trigger"}], background=True, previous_response_id=response.id)
    compacted = await read(harness, trigger.response.id)
    assert [item.type for item in compacted.output] == ["compaction"]
    assert compacted.served_by == "test/scripted"


async def read(harness: EngineHarness, response_id: str) -> Response:
    batches = await harness.engine.follow("default", response_id, after=-1)
    return judge([codec.decode_event(event.raw) async for batch in batches for event in batch])


@pytest.mark.parametrize("shown", ["the compacting", "the compaction", "the answer"])
async def test_resumed_run_reuses_the_emitted_compaction(make_harness: Any, tmp_path: Path, shown: str) -> None:
    path = tmp_path / "store.db"
    steps: dict[str, Any] = {"the compacting": [{"wait": "gate"}, {"text": "lost"}]}
    notes = {"text": "You write the notes", "answers": [steps.get(shown, NOTES)]}
    opening = [{"text": ["It", " was"]}] if shown == "the answer" else []
    first = await make_harness(
        {"rules": [notes], "default": [*opening, {"wait": "gate"}, {"text": " lost"}]}, store=SqliteStore(path)
    )
    run = await first.ask([*HISTORY, user("recall")], background=True, **THRESHOLD)
    last = {"the compacting": b"compacting", "the compaction": b"item.done", "the answer": b" was"}[shown]
    seen: list[Any] = []
    reader = await first.engine.follow("default", run.response.id, after=-1)
    while not seen or last not in seen[-1].raw:
        seen += await anext(reader)
    await reader.aclose()
    await first.engine.close()
    other = {"text": "You write the notes", "answers": ["Other words, which nobody may see in the place of the first."]}
    second = await make_harness(
        {
            "rules": [other if shown == "the compacting" else {**other, "answers": [[{"crash": "not again"}]]}],
            "default": [{"text": ["It", " was", " so."]}],
        },
        store=SqliteStore(path),
    )
    batches = await second.engine.follow("default", run.response.id, after=-1)
    reported = [codec.decode_event(event.raw) async for batch in batches for event in batch]
    assert [codec.encode(event) for event in reported[: len(seen)]] == [event.raw for event in seen]
    response = judge(reported)
    assert (response.status, response.output_text) == ("completed", "It was so.")
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert (await second.answer("hi", previous_response_id=response.id)).status == "completed"
