"""A store written by version 0.1.0 opens and continues. `fixtures/make_store_0_1_0.py` wrote the file."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.policy import Policy
from antiphon.protocol import codec
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness, judge

FIXTURES = Path(__file__).with_name("fixtures")
IDS: dict[str, str] = json.loads((FIXTURES / "store-0.1.0.json").read_text())

SCRIPT = {
    "rules": [
        {"user": "slowly", "answers": [[{"text": ["so", " far"]}, {"text": [" and", " on"]}]]},
        {"user": "Continue", "answers": ["After {history} items: {input}"]},
    ]
}


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[EngineHarness]:
    path = tmp_path / "store.db"
    shutil.copy(FIXTURES / "store-0.1.0.sqlite3", path)
    harness = EngineHarness(SCRIPT, SqliteStore(path), Policy())
    await harness.engine.start()
    yield harness
    await harness.engine.close()


async def read_events(harness: EngineHarness, name: str, *, after: int = -1) -> list[Any]:
    batches = await harness.engine.follow("default", IDS[name], after=after)
    return [codec.decode_event(event.raw) async for batch in batches for event in batch]


async def test_responses_are_retrieved(harness: EngineHarness) -> None:
    first, second, third = [
        await harness.engine.retrieve("default", IDS[name]) for name in ("first", "second", "third")
    ]
    assert [response.status for response in (first, second, third)] == ["completed"] * 3
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert [item.type for item in second.output] == ["function_call"]
    assert (third.output_text, third.previous_response_id) == ("It is 21 degrees.", second.id)


async def test_chain_is_continued(harness: EngineHarness) -> None:
    response = await harness.answer("Continue.", previous_response_id=IDS["third"])
    # Four items of input, and of output a reasoning item, two messages and a call.
    assert response.output_text == "After 8 items: Continue."


async def test_input_items_of_a_response_are_listed(harness: EngineHarness) -> None:
    page = await harness.engine.input_items("default", IDS["second"], after=None, limit=20, order="asc")
    assert [item.content[0].text for item in page.data] == ["What is the temperature?"]


async def test_conversation_is_listed_and_continued(harness: EngineHarness) -> None:
    conversation = await harness.engine.conversations.retrieve("default", IDS["conversation"])
    assert conversation.metadata == {"topic": "names"}
    response = await harness.answer("Continue.", conversation=conversation.id)
    assert response.output_text == "After 4 items: Continue."
    page = await harness.engine.conversations.list_items("default", conversation.id, after=None, limit=20, order="asc")
    texts = [item.content if isinstance(item.content, str) else item.content[0].text for item in page.data]
    assert texts == [
        "I am Ada.",
        "Good morning.",
        "You said: Good morning.",
        "Continue.",
        "After 4 items: Continue.",
    ]


async def test_prompt_is_used(harness: EngineHarness) -> None:
    versions = await harness.engine.prompts.list_all("default")
    assert [(each.id, each.version) for each in versions] == [("pmpt_greeting", "1"), ("pmpt_greeting", "2")]
    prompt = {"id": "pmpt_greeting", "variables": {"name": "Ada"}}
    response = await harness.answer(None, prompt=prompt)
    assert (response.instructions, response.output_text) == ("The second version.", "You said: Greet Ada.")


async def test_events_of_a_finished_background_response_are_followed(harness: EngineHarness) -> None:
    events = await read_events(harness, "finished")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert judge(events).output_text == "You said: In the background."
    assert await read_events(harness, "finished", after=4) == events[5:]


async def test_queued_background_response_runs(harness: EngineHarness) -> None:
    assert judge(await read_events(harness, "queued")).output_text == "You said: Later."
    assert (await harness.engine.retrieve("default", IDS["queued"])).status == "completed"


async def test_background_response_of_a_dead_process_is_resumed(harness: EngineHarness) -> None:
    stored = await harness.store.read_events("default", IDS["claimed"], -1)
    events = await read_events(harness, "claimed")
    assert judge(events).output_text == "so far and on"
    # A reader has seen the events of the first attempt, so they stay.
    assert len(stored) >= 7
    assert [codec.decode_event(payload) for _, payload in stored] == events[: len(stored)]
