"""The transcript that a summary is made from."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.summary import write_transcript
from antiphon.protocol.content import SummaryText
from antiphon.protocol.items import CustomToolCall, Item, Message, Reasoning
from antiphon.protocol.unions import Unknown
from support.compaction import assistant, call, output, user


def test_transcript_names_the_role_of_each_entry() -> None:
    conversation: list[Item | Unknown] = [
        Message("system", "Be kind."),
        user("look"),
        Reasoning([SummaryText("I look.")], "rs_1"),
        Reasoning([], "rs_2", encrypted_content="sealed"),
        call("c", '{"at":"it"}'),
        output("c", "a bridge"),
        CustomToolCall("d", "run", "ls"),
        assistant("A bridge."),
        Unknown(b'{"type":"acme:x"}'),
    ]
    assert write_transcript(conversation, 1000).splitlines() == [
        "system: Be kind.",
        "user: look",
        "assistant thinks: I look.",
        'assistant calls look: {"at":"it"}',
        "tool answers: a bridge",
        "assistant calls run: ls",
        "assistant: A bridge.",
        'acme:x: {"type":"acme:x"}',
    ]


def test_long_entries_are_clipped_before_entries_are_dropped() -> None:
    conversation: list[Item | Unknown] = [user("first"), output("c", "x" * 100_000), user("last")]
    lines = write_transcript(conversation, 3000).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("user: first", "user: last", 5)


def test_first_and_last_of_too_many_entries_stay() -> None:
    conversation: list[Item | Unknown] = [user(f"word {number}") for number in range(10_000)]
    lines = write_transcript(conversation, 1000).splitlines()
    assert (lines[0], lines[-1]) == ("user: word 0", "user: word 9999")
    gone = next(line for line in lines if line.startswith("[..."))
    assert gone == f"[... {10_000 - len(lines) + 1} entries were left out here ...]"


@given(st.lists(st.text(max_size=300).map(user), max_size=30), st.integers(0, 2000))
def test_transcript_is_within_its_limit(conversation: list[Item | Unknown], size: int) -> None:
    assert len(write_transcript(conversation, size)) <= size
