"""Input that repeats the history of the previous response."""

from typing import Any

import pytest

from antiphon.protocol.response import Response
from antiphon.store.base import StoredResponse
from support.engine_harness import EngineHarness


@pytest.fixture
async def harness(make_harness: Any) -> EngineHarness:
    made: EngineHarness = await make_harness({"default": "{history} items"})
    return made


def say(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def show(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}


async def talk(harness: EngineHarness, *sent_input: Any) -> tuple[Response, list[Any]]:
    """The last response of a chain, and all of the chain as a client has it."""
    history: list[Any] = []
    response = None
    for each in sent_input:
        response = await harness.answer([each], previous_response_id=response and response.id)
        history += [each, *response.output]
    assert response is not None
    return response, history


async def keep(harness: EngineHarness, sent_input: list[Any], previous: Response) -> tuple[list[int], list[str]]:
    """Return the indexes of the new items, and the warnings about the others."""
    run = await harness.ask(sent_input, previous_response_id=previous.id)
    stored: StoredResponse | None = await harness.store.load("default", (await run.drain()).id)
    assert stored is not None
    left_out = {int(each.removeprefix("input[").partition("]")[0]) for each in run.warnings}
    assert len(stored.input) == len(sent_input) - len(left_out)
    return sorted(set(range(len(sent_input))) - left_out), run.warnings


async def test_repeated_messages_without_ids_are_dropped(harness: EngineHarness) -> None:
    first = await harness.answer("hello")
    sent_input = [{"role": "user", "content": "hello"}, first.output[0], {"role": "user", "content": "next"}]
    second = await harness.answer(sent_input, previous_response_id=first.id)
    assert second.output_text == "3 items"


async def test_dropped_items_produce_warnings(harness: EngineHarness) -> None:
    response, history = await talk(harness, say("hello"))
    assert await keep(harness, [*history, say("next")], response) == (
        [2],
        [
            "input[0]: this message is part of the history already",
            f"input[1]: {response.output[0].id} is part of the history already",
        ],
    )


async def test_repeated_long_history_or_its_end_is_dropped(harness: EngineHarness) -> None:
    response, history = await talk(
        harness, say("yes"), say("no"), say("yes"), say("a", "b"), show("https://a.example/b.png")
    )
    for start in range(10):
        new, _ = await keep(harness, [*history[start:], say("yes")], response)
        assert new == [10 - start]


async def test_answer_without_an_id_is_found_between_known_items(harness: EngineHarness) -> None:
    response, history = await talk(harness, say("one"), say("two"))
    history[1] = {"role": "assistant", "content": "1 items"}
    assert (await keep(harness, [*history, say("next")], response))[0] == [4]


@pytest.mark.parametrize("end", [[], [say("yes")], [say("no"), say("yes")]])
async def test_repeated_user_message_at_the_end_is_new(harness: EngineHarness, end: list[Any]) -> None:
    response, history = await talk(harness, say("yes"), say("no"))
    assert await keep(harness, [say("yes"), *end], response) == (list(range(1 + len(end))), [])
    assert (await keep(harness, [*history, say("yes"), *end], response))[0] == list(range(4, 5 + len(end)))


async def test_message_at_another_position_is_new(harness: EngineHarness) -> None:
    response, history = await talk(harness, say("one"), say("two"))
    first, one, second, two = history
    # A note that was put in between, another order, another speaker, another picture.
    assert (await keep(harness, [first, say("note"), one, second, two], response))[0] == [1]
    assert (await keep(harness, [second, one, first, two], response))[0] == [0, 2]
    assert (await keep(harness, [say("one", role="developer"), one, second, two], response))[0] == [0]
    pictured, (shown, seen) = await talk(harness, show("https://a.example/1.png"))
    assert (await keep(harness, [show("https://a.example/2.png"), seen], pictured))[0] == [0]
    assert (await keep(harness, [shown, seen], pictured))[0] == []


async def test_message_with_an_unknown_id_is_new(harness: EngineHarness) -> None:
    response, (sent_input, answer) = await talk(harness, say("one"))
    assert (await keep(harness, [sent_input | {"id": "msg_mine"}, answer], response))[0] == [0]


async def test_messages_before_an_out_of_order_item_are_new(harness: EngineHarness) -> None:
    response, (first, one, _, two) = await talk(harness, say("one"), say("two"))
    assert (await keep(harness, [two, first, one], response))[0] == [1]


async def test_outputs_and_references_mark_message_positions(make_harness: Any) -> None:
    call = {"tool_call": {"name": "f", "arguments": {}, "call_id": "call_0"}}
    harness = await make_harness(
        {"rules": [{"last_item": "function_call_output", "answers": ["done"]}], "default": [call]}
    )
    opened = await harness.answer([say("go")], tools=[{"type": "function", "name": "f", "parameters": {}}])
    output = {"type": "function_call_output", "call_id": "call_0", "output": "out"}
    done = await harness.answer([output], previous_response_id=opened.id)
    assert (await keep(harness, [say("go"), output, *done.output], done))[0] == []
    referred = {"type": "item_reference", "id": opened.output[0].id}
    assert (await keep(harness, [say("go"), referred, say("go")], done))[0] == [2]
