"""Expansion of compaction items in a history."""

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


def test_compaction_content_replaces_covered_items() -> None:
    assert read(RULE, *OLD, ITEM, user("next")) == [RULE, *SEEN, user("next")]


def test_lone_compaction_expands_to_its_content() -> None:
    assert read(ITEM, user("next")) == [*SEEN, user("next")]


def test_uncovered_items_stay_before_the_content() -> None:
    fresh = user("<environment>fresh</environment>")
    assert read(RULE, fresh, *OLD, ITEM, user("next")) == [RULE, fresh, *SEEN, user("next")]


@pytest.mark.parametrize(
    "rule", [RULE, Message("system", "x"), AdditionalTools("developer", []), ConfigurationUpdate()]
)
def test_instructions_stay_even_if_covered(rule: Item) -> None:
    memory = msgspec.structs.replace(MEMORY, covered=join_fingerprints([fingerprint_item(rule)]))
    item = seal_content(memory, SEALER, project=PROJECT)
    assert read(rule, item) == [rule, *SEEN[:-1], item]


def test_retained_messages_sent_again_are_not_doubled() -> None:
    assert read(RULE, user("build"), ITEM, user("next")) == [RULE, *SEEN, user("next")]


def test_reasoning_is_replaced_with_the_next_item() -> None:
    lone = Reasoning(id="rs_1", encrypted_content="of another day")
    assert read(*OLD[:3], lone, *OLD[3:], ITEM) == SEEN


def test_output_of_a_later_call_does_not_answer_a_retained_call() -> None:
    memory = CompactionContent(summary="", first=[user("build")], last=[call("c")], covered=b"")
    item = seal_content(memory, SEALER, project=PROJECT)
    retained = [user("build"), call("c")]
    noted = [*retained, FunctionCallOutput(LOST_OUTPUT, "c", status="completed")]
    expected_warnings = ["the call c had no output and got a note instead"]
    again: list[Item | Unknown] = [user("again"), call("c")]
    answered = expand_compactions([item, output("c", "x")], SEALER, project=PROJECT)
    assert (answered.items, answered.warnings) == ([*retained, item, output("c", "x")], [])
    waiting = expand_compactions([item], SEALER, project=PROJECT, answered_next={"c"})
    assert (waiting.items, waiting.warnings) == ([*retained, item], [])
    for later, answered_next in (([*again, output("c", "x")], ()), (again, {"c"})):
        expanded = expand_compactions([item, *later], SEALER, project=PROJECT, answered_next=answered_next)
        assert (expanded.items, expanded.warnings) == ([*noted, item, *later], expected_warnings)


def test_expanding_twice_changes_nothing() -> None:
    once = read(RULE, *OLD, ITEM, user("next"))
    assert read(*once) == once


def test_last_compaction_replaces_older_ones() -> None:
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
def test_unreadable_compaction_is_dropped_with_a_warning(text: str) -> None:
    expanded = expand_compactions([RULE, *OLD, Compaction(text, "cmp_2"), user("next")], SEALER, project=PROJECT)
    assert expanded.items == [RULE, *OLD, user("next")]
    assert expanded.warnings == ["compaction cmp_2: its encrypted_content cannot be opened here and was left out"]


def test_compaction_of_another_project_is_not_expanded() -> None:
    expanded = expand_compactions([*OLD, ITEM], SEALER, project="another")
    assert (expanded.items, len(expanded.warnings)) == (OLD, 1)


def test_earlier_compaction_is_used_if_the_last_is_unreadable() -> None:
    expanded = expand_compactions([*OLD, ITEM, user("next"), Compaction("broken", "cmp_2")], SEALER, project=PROJECT)
    assert (expanded.items, len(expanded.warnings)) == ([*SEEN, user("next")], 1)


def test_empty_compaction_is_dropped_without_a_warning() -> None:
    assert read(*OLD, Compaction("", "cmp_2")) == OLD


def test_compacted_items_are_listed() -> None:
    assert expand_compactions([RULE, *OLD, ITEM], SEALER, project=PROJECT).compacted == [*OLD, ITEM]


def test_only_a_trigger_at_the_end_counts() -> None:
    assert read(user("a"), CompactionTrigger(), user("b"), CompactionTrigger()) == [
        user("a"),
        user("b"),
        CompactionTrigger(),
    ]
    assert ends_in_trigger([user("a"), CompactionTrigger()])
    assert not ends_in_trigger([user("a")])
    assert not ends_in_trigger([])


def test_trigger_before_the_end_is_refused_with_its_path() -> None:
    check_trigger([user("a"), CompactionTrigger()])
    with pytest.raises(InvalidRequest) as caught:
        check_trigger([user("a"), CompactionTrigger(), user("b")])
    assert caught.value.param == "input[1]"


def test_calls_before_a_trigger_may_lack_outputs() -> None:
    items: list[Item | Unknown] = [output("lost", "x"), user("a"), call("c"), CompactionTrigger()]
    assert repair_before_trigger(items) == (items[1:], ["an output without its call lost was left out"])


def test_backend_gets_no_compaction_items_or_settings() -> None:
    turn = make_turn([user("a"), ITEM, CompactionTrigger()], context_management=[ContextManagement("compaction")])
    assert strip_compaction(turn) == make_turn([user("a")])
    plain = make_turn([user("a")])
    assert strip_compaction(plain) is plain
