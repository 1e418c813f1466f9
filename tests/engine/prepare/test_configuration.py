"""Settings that change on the way through a conversation."""

from typing import Any

import pytest

from antiphon.engine.prepare.parameters import apply_configuration_updates, check_configuration_updates
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import ITEMS, Item, Message
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, ReasoningConfig, TextConfig, TextFormat
from antiphon.protocol.unions import Unknown
from support.engine_harness import Bench

OBJECT = {"format": {"type": "json_object"}}


def update(**fields: Any) -> Item | Unknown:
    return ITEMS.decode(codec.encode({"type": "configuration_update", **fields}))


def test_the_newest_of_each_setting_holds() -> None:
    asked = CreateRequest(reasoning=ReasoningConfig("high", "auto"), text=TextConfig(TextFormat(), "low"))
    items = [
        update(reasoning={"effort": "low"}, text=OBJECT),
        Message("user", "hi"),
        update(reasoning={"effort": "medium"}),
    ]
    changed, useless = apply_configuration_updates(asked, items)
    assert useless == []
    assert (changed.reasoning, changed.text) == (
        ReasoningConfig("medium", "auto"),
        TextConfig(JsonObjectFormat(), "low"),
    )
    assert (asked.reasoning, asked.text) == (ReasoningConfig("high", "auto"), TextConfig(TextFormat(), "low"))


def test_a_request_without_updates_stays_as_it_is() -> None:
    asked = CreateRequest()
    changed, useless = apply_configuration_updates(asked, [Message("user", "hi")])
    assert (changed is asked, useless) == (True, [])


def test_an_update_in_the_history_that_sets_what_cannot_be_stands_in_nobodys_way() -> None:
    damaged = update(id="cu_1", reasoning={"effort": "huge"})
    changed, useless = apply_configuration_updates(CreateRequest(), [damaged, update(reasoning={"effort": "low"})])
    assert changed.reasoning == ReasoningConfig("low")
    assert [each.partition(":")[0] for each in useless] == ["the configuration_update cu_1 was left out"]


async def test_a_conversation_takes_no_update_that_sets_what_cannot_be(bench: Bench) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await bench.engine.conversations.create("default", [update(reasoning={"effort": "huge"})], None)
    assert caught.value.param == "items[0].reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "huge"}}, "input[0].reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "input[0].text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "input[0].text.format.schema"),
    ],
)
def test_what_cannot_be_set_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_configuration_updates([update(**fields)])
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


async def test_an_update_holds_for_the_turns_to_come_and_is_echoed(make_bench: Any) -> None:
    bench = await make_bench()
    sent = {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": OBJECT}
    first = await bench.answer([sent, {"role": "user", "content": "hi"}])
    second = await bench.answer("again", previous_response_id=first.id, reasoning={"effort": "high"})
    assert [(each.reasoning.effort, each.text.format) for each in (first, second)] == [("low", JsonObjectFormat())] * 2
