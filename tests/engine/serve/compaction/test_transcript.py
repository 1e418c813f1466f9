"""A conversation as plain text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.serve.compaction.summary import write_transcript
from antiphon.protocol.content import SummaryText
from antiphon.protocol.items import CustomToolCall, Item, Message, Reasoning
from antiphon.protocol.unions import Unknown
from support.compaction import assistant, call, output, user


def test_everyone_is_named() -> None:
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


def test_long_entries_lose_their_middle_before_whole_entries_go() -> None:
    conversation: list[Item | Unknown] = [user("first"), output("c", "x" * 100_000), user("last")]
    lines = write_transcript(conversation, 3000).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("user: first", "user: last", 5)


def test_of_too_many_entries_the_first_and_the_last_stay() -> None:
    conversation: list[Item | Unknown] = [user(f"word {number}") for number in range(10_000)]
    lines = write_transcript(conversation, 1000).splitlines()
    assert (lines[0], lines[-1]) == ("user: word 0", "user: word 9999")
    gone = next(line for line in lines if line.startswith("[..."))
    assert gone == f"[... {10_000 - len(lines) + 1} entries were left out here ...]"


@settings(max_examples=50)
@given(st.lists(st.text(max_size=300).map(user), max_size=30), st.integers(0, 2000))
def test_it_is_never_longer_than_it_may_be(conversation: list[Item | Unknown], size: int) -> None:
    assert len(write_transcript(conversation, size)) <= size
