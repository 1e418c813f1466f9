"""Compactions in a conversation, and what becomes of the items around them."""

import msgspec
import pytest

from antiphon.engine.serve.compaction.compaction_item import (
    CompactionContent,
    fingerprint_item,
    join_fingerprints,
    make_summary_message,
    seal_content,
)
from antiphon.engine.serve.compaction.expansion import (
    check_trigger,
    ends_in_trigger,
    expand_compactions,
    repair_before_trigger,
    strip_compaction,
)
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import AdditionalTools
from antiphon.protocol.items import (
    LOST_OUTPUT,
    Compaction,
    CompactionTrigger,
    ConfigurationUpdate,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.request import ContextManagement
from antiphon.protocol.unions import Unknown
from support.compaction import PROJECT, SEALER, assistant, call, make_turn, output, user

RULE = Message("developer", "Be kind.")
OLD: list[Item | Unknown] = [user("build"), assistant("how?"), user("in red"), call("c"), output("c", "x" * 500)]
MEMORY = CompactionContent(
    summary="A red bridge.",
    first=[user("build")],
    last=[call("c"), output("c", "x...x")],
    covered=join_fingerprints(map(fingerprint_item, OLD)),
)
ITEM = msgspec.structs.replace(seal_content(MEMORY, SEALER, project=PROJECT), id="cmp_1")
SEEN: list[Item | Unknown] = [
    user("build"),
    make_summary_message("A red bridge."),
    call("c"),
    output("c", "x...x"),
    ITEM,
]


def read(*items: Item | Unknown, project: str = PROJECT) -> list[Item | Unknown]:
    expanded = expand_compactions(items, SEALER, project=project)
    assert expanded.warnings == []
    return expanded.items


def test_it_takes_the_place_of_what_it_covers() -> None:
    assert read(RULE, *OLD, ITEM, user("next")) == [RULE, *SEEN, user("next")]


def test_it_stands_for_everything_when_it_comes_alone() -> None:
    assert read(ITEM, user("next")) == [*SEEN, user("next")]


def test_what_it_does_not_cover_stays_before_it() -> None:
    fresh = user("<environment>fresh</environment>")
    assert read(RULE, fresh, *OLD, ITEM, user("next")) == [RULE, fresh, *SEEN, user("next")]


@pytest.mark.parametrize(
    "rule", [RULE, Message("system", "x"), AdditionalTools("developer", []), ConfigurationUpdate()]
)
def test_a_rule_stays_even_if_it_is_covered(rule: Item) -> None:
    memory = msgspec.structs.replace(MEMORY, covered=join_fingerprints([fingerprint_item(rule)]))
    item = seal_content(memory, SEALER, project=PROJECT)
    assert read(rule, item) == [rule, *SEEN[:-1], item]


def test_retained_messages_that_come_back_with_it_are_not_doubled() -> None:
    assert read(RULE, user("build"), ITEM, user("next")) == [RULE, *SEEN, user("next")]


def test_reasoning_goes_with_what_it_led_to() -> None:
    lone = Reasoning(id="rs_1", encrypted_content="of another day")
    assert read(*OLD[:3], lone, *OLD[3:], ITEM) == SEEN


def test_an_output_after_another_call_with_its_id_does_not_answer_the_open_call_that_was_kept() -> None:
    memory = CompactionContent(summary="", first=[user("build")], last=[call("c")], covered=b"")
    item = seal_content(memory, SEALER, project=PROJECT)
    kept = [user("build"), call("c")]
    noted = [*kept, FunctionCallOutput(LOST_OUTPUT, "c", status="completed")]
    told = ["the call c had no output and got a note instead"]
    again: list[Item | Unknown] = [user("again"), call("c")]
    answered = expand_compactions([item, output("c", "x")], SEALER, project=PROJECT)
    assert (answered.items, answered.warnings) == ([*kept, item, output("c", "x")], [])
    waiting = expand_compactions([item], SEALER, project=PROJECT, answered_next={"c"})
    assert (waiting.items, waiting.warnings) == ([*kept, item], [])
    for later, answered_next in (([*again, output("c", "x")], ()), (again, {"c"})):
        expanded = expand_compactions([item, *later], SEALER, project=PROJECT, answered_next=answered_next)
        assert (expanded.items, expanded.warnings) == ([*noted, item, *later], told)


def test_expanding_again_changes_nothing() -> None:
    once = read(RULE, *OLD, ITEM, user("next"))
    assert read(*once) == once


def test_the_last_one_counts_and_older_ones_go() -> None:
    newer = seal_content(
        CompactionContent(
            summary="Done.",
            first=[],
            last=[],
            covered=join_fingerprints(map(fingerprint_item, [*OLD, *SEEN[:-1], user("next")])),
        ),
        SEALER,
        project=PROJECT,
    )
    assert read(*OLD, ITEM, user("next"), newer, user("more")) == [make_summary_message("Done."), newer, user("more")]
    assert read(*read(*OLD, ITEM, user("next")), newer) == [make_summary_message("Done."), newer]


@pytest.mark.parametrize("text", ["of another server", ITEM.encrypted_content[:-9] + "AAAAAAAAA"])
def test_one_that_does_not_open_is_left_out_with_a_warning_and_nothing_else(text: str) -> None:
    expanded = expand_compactions([RULE, *OLD, Compaction(text, "cmp_2"), user("next")], SEALER, project=PROJECT)
    assert expanded.items == [RULE, *OLD, user("next")]
    assert expanded.warnings == ["compaction cmp_2: its encrypted_content cannot be opened here and was left out"]


def test_one_of_another_project_does_not_open() -> None:
    expanded = expand_compactions([*OLD, ITEM], SEALER, project="another")
    assert (expanded.items, len(expanded.warnings)) == (OLD, 1)


def test_when_the_last_does_not_open_the_one_before_counts() -> None:
    expanded = expand_compactions([*OLD, ITEM, user("next"), Compaction("broken", "cmp_2")], SEALER, project=PROJECT)
    assert (expanded.items, len(expanded.warnings)) == ([*SEEN, user("next")], 1)


def test_one_that_never_came_about_is_left_out_in_silence() -> None:
    assert read(*OLD, Compaction("", "cmp_2")) == OLD


def test_what_is_left_out_is_told() -> None:
    assert expand_compactions([RULE, *OLD, ITEM], SEALER, project=PROJECT).compacted == [*OLD, ITEM]


def test_only_a_trigger_at_the_end_asks_for_something() -> None:
    assert read(user("a"), CompactionTrigger(), user("b"), CompactionTrigger()) == [
        user("a"),
        user("b"),
        CompactionTrigger(),
    ]
    assert ends_in_trigger([user("a"), CompactionTrigger()])
    assert not ends_in_trigger([user("a")])
    assert not ends_in_trigger([])


def test_a_trigger_before_the_end_of_the_input_is_refused_by_its_place() -> None:
    check_trigger([user("a"), CompactionTrigger()])
    with pytest.raises(InvalidRequest) as caught:
        check_trigger([user("a"), CompactionTrigger(), user("b")])
    assert caught.value.param == "input[1]"


def test_calls_before_a_trigger_may_be_open() -> None:
    items: list[Item | Unknown] = [output("lost", "x"), user("a"), call("c"), CompactionTrigger()]
    assert repair_before_trigger(items) == (items[1:], ["an output without its call lost was left out"])


def test_a_backend_sees_nothing_of_it() -> None:
    turn = make_turn([user("a"), ITEM, CompactionTrigger()], context_management=[ContextManagement("compaction")])
    assert strip_compaction(turn) == make_turn([user("a")])
    plain = make_turn([user("a")])
    assert strip_compaction(plain) is plain
