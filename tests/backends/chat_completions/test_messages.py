"""Translation of a conversation to Chat Completions messages."""

import base64
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.chat_completions import messages as messages_module
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.request import make_body
from antiphon.errors import InvalidRequest
from support.chat_messages import (
    PICTURE,
    PLAIN,
    assistant,
    call,
    chat_call,
    make_turn,
    messages,
    output,
    picture,
    say,
    text,
    think,
    tool,
    user,
)

# Messages


def test_s3_8_messages_keep_order_and_roles() -> None:
    items = [
        say("user", "one"),
        say("assistant", "two"),
        call("call_a", '{"q": 1}'),
        output("call_a", "found"),
        say("assistant", "three"),
        say("user", "four"),
    ]
    assert messages(items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        user("one"),
        assistant("two", chat_call("call_a", '{"q": 1}')),
        tool("call_a", "found"),
        assistant("three"),
        user("four"),
    ]


def test_s3_8_text_input_is_a_user_message() -> None:
    assert messages("hi") == [user("hi")]


def test_system_messages_are_merged_at_the_front() -> None:
    items = [
        say("user", "one"),
        say("developer", "B"),
        say("assistant", "two"),
        say("system", "C"),
        say("user", "three"),
    ]
    assert messages(items, instructions="A") == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        user("one"),
        assistant("two"),
        user("three"),
    ]


def test_system_messages_can_stay_in_position() -> None:
    items = [say("user", "one"), say("developer", "B"), say("user", "two")]
    assert messages(items, Quirks(merge_system=False, system_role="developer"), instructions="A") == [
        {"role": "developer", "content": "A"},
        user("one"),
        {"role": "developer", "content": "B"},
        user("two"),
    ]


def test_system_text_becomes_user_text_without_system_role() -> None:
    items = [
        say("user", "one"),
        say("user", "two"),
        say("assistant", "three"),
        say("user", "four", {"type": "input_image", "image_url": PICTURE}),
        say("user", "five"),
    ]
    assert messages(items, Quirks(system_role="user", alternate=True), instructions="A") == [
        user("A\n\none\n\ntwo"),
        assistant("three"),
        user([text("four"), picture(), text("five")]),
    ]


def test_s3_9_user_message_parts_are_translated() -> None:
    parts = [
        "look",
        {"type": "input_image", "image_url": PICTURE, "detail": "original"},
        {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "acme:thing", "x": 1},
    ]
    assert messages([say("user", *parts)]) == [
        user(
            [
                text("look"),
                picture(detail="high"),
                picture("https://example.com/a.png", detail="low"),
                {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
                text('{"type": "acme:thing", "x": 1}'),
            ]
        )
    ]


def test_s3_9_text_only_content_is_a_string() -> None:
    items = [
        say("user", "one", "two"),
        say("assistant", "a", "b"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert messages(items) == [user("one\ntwo"), assistant("ab\n\nNo.")]


def test_text_file_is_sent_as_text() -> None:
    data = "data:text/markdown;charset=utf-8;base64," + base64.b64encode("# Größe".encode()).decode()
    assert messages([say("user", {"type": "input_file", "filename": "a.md", "file_data": data})]) == [
        user("[File: a.md]\n# Größe")
    ]


def test_undecodable_text_file_is_sent_as_file() -> None:
    data = "data:text/plain;base64,/w=="
    sent = messages([say("user", {"type": "input_file", "file_data": data})])
    assert sent == [user([{"type": "file", "file": {"filename": "file", "file_data": data}}])]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "input_file", "file_id": "file_1"}, (404, "input[0].content[0].file_id", None)),
        ({"type": "input_image", "file_id": "file_1"}, (404, "input[0].content[0].file_id", None)),
        (
            {"type": "input_file", "file_url": "https://example.com/a.pdf"},
            (400, "input[0].content[0].file_url", "unsupported_parameter"),
        ),
        ({"type": "input_file", "file_data": "%%%"}, (400, "input[0].content[0].file_data", "invalid_value")),
    ],
)
def test_file_that_cannot_be_sent_is_rejected(part: dict[str, Any], error: tuple[int, str, str | None]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages([say("user", part)])
    assert (caught.value.status, caught.value.param, caught.value.code) == error


@pytest.mark.parametrize(
    ("name", "data", "sent"),
    [
        ("a.txt", b"text", "[File: a.txt]\ntext"),
        ("long.txt", b"t" * 60, f"[File: long.txt]\n{'t' * 60}"),
        (
            "a",
            b"%PDF-1",
            [{"type": "file", "file": {"filename": "a", "file_data": "data:application/pdf;base64,JVBERi0x"}}],
        ),
    ],
)
def test_base64_without_a_type_is_sent_as_text_or_data_url(name: str, data: bytes, sent: Any) -> None:
    part = {"type": "input_file", "filename": name, "file_data": base64.encodebytes(data).decode()}
    assert messages([say("user", part)]) == [user(sent)]


def test_file_references_are_sent_to_supporting_servers() -> None:
    by_id = say("user", {"type": "input_file", "file_id": "file_1"})
    by_url = say("user", {"type": "input_file", "file_url": "https://example.com/a.pdf", "filename": "a.pdf"})
    assert messages([by_id, by_url], Quirks(file_ids=True, file_urls=True)) == [
        user([{"type": "file", "file": {"file_id": "file_1"}}]),
        user([{"type": "file", "file": {"filename": "a.pdf", "file_data": "https://example.com/a.pdf"}}]),
    ]


def test_images_of_other_roles_follow_in_a_user_message() -> None:
    image = {"type": "input_image", "image_url": PICTURE}
    items = [say("developer", "Look:", image), say("assistant", "So.", image), say("user", "hi")]
    assert messages(items) == [
        {"role": "system", "content": "Look:"},
        user([text("[Attached to the developer message]"), picture()]),
        assistant("So."),
        user([text("[Attached to the assistant message]"), picture()]),
        user("hi"),
    ]


def test_unknown_item_is_sent_as_json() -> None:
    assert messages([{"type": "acme:note", "id": "n_1", "x": 1}]) == [
        user('{"type": "acme:note", "id": "n_1", "x": 1}')
    ]


# Calls and outputs


def test_parallel_calls_are_one_message_with_ordered_outputs() -> None:
    items = [
        say("user", "go"),
        say("assistant", "I look."),
        call("call_a"),
        call("call_b"),
        output("call_b", "second"),
        say("user", "meanwhile"),
        output("call_a", "first"),
    ]
    assert messages(items) == [
        user("go"),
        assistant("I look.", chat_call("call_a"), chat_call("call_b")),
        tool("call_a", "first"),
        tool("call_b", "second"),
        user("meanwhile"),
    ]


def test_text_between_call_and_output_joins_the_call() -> None:
    items = [call("call_a"), say("assistant", "Now I wait."), output("call_a")]
    assert messages(items) == [assistant("Now I wait.", chat_call("call_a")), tool("call_a")]


@pytest.mark.parametrize(
    ("texts", "sent"), [(["", "Now."], "Now."), (["One.", "", "Two."], "One.\n\nTwo."), (["", ""], ""), ([""], "")]
)
def test_empty_texts_beside_a_call_are_not_joined(texts: list[str], sent: str) -> None:
    items = [*(say("assistant", each) for each in texts), call("call_a"), output("call_a")]
    assert messages(items) == [assistant(sent, chat_call("call_a")), tool("call_a")]


def test_invalid_arguments_in_history_are_wrapped() -> None:
    written = ['{ "a":1.0 }', '{"a', "[1]", ""]
    message = messages([call(f"c{n}", arguments) for n, arguments in enumerate(written)])[0]
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [
        '{ "a":1.0 }',
        '{"arguments":"{\\"a"}',
        '{"arguments":"[1]"}',
        "{}",
    ]


def test_sequential_calls_stay_sequential() -> None:
    items = [call("call_a"), output("call_a"), call("call_b"), output("call_b")]
    assert messages(items) == [
        assistant(None, chat_call("call_a")),
        tool("call_a"),
        assistant(None, chat_call("call_b")),
        tool("call_b"),
    ]


def test_repeated_call_id_is_made_unique() -> None:
    items = [call("call_0"), output("call_0", "one"), call("call_0"), output("call_0", "two")]
    assert messages(items) == [
        assistant(None, chat_call("call_0")),
        tool("call_0", "one"),
        assistant(None, chat_call("call_0_2")),
        tool("call_0_2", "two"),
    ]


def test_parallel_calls_with_one_id_keep_their_outputs() -> None:
    items = [call("call_0"), call("call_0"), output("call_0", "one"), output("call_0", "two")]
    assert messages(items) == [
        assistant(None, chat_call("call_0"), chat_call("call_0_2")),
        tool("call_0", "one"),
        tool("call_0_2", "two"),
    ]


_IDS = st.sampled_from(["a", "a_2", "b", ""])
_OUTPUTS = st.sampled_from(["one", "", [{"type": "input_text", "text": "two"}]])


@given(
    st.lists(
        st.one_of(
            st.builds(call, _IDS, st.sampled_from(["{}", "not JSON"])),
            st.builds(output, st.one_of(_IDS, st.none()), _OUTPUTS),
            st.builds(say, st.sampled_from(["user", "assistant"]), st.just("text")),
            st.just(think("why")),
        ),
        max_size=8,
    ),
    st.sampled_from(
        [
            PLAIN,
            Quirks(alternate=True),
            Quirks(call_ids="nine"),
            Quirks(placeholder_signature="s"),
            Quirks(replay_reasoning="calls"),
            Quirks(separate_outputs=True),
        ]
    ),
)
def test_answered_call_is_translated_like_any_calls(items: list[Any], quirks: Quirks) -> None:
    turn = make_turn(items)
    with patch.object(messages_module._MessageBuilder, "_add_answered_call", return_value=False):
        expected = make_body(turn, quirks)
    assert make_body(turn, quirks) == expected


def test_call_without_output_gets_a_placeholder() -> None:
    lost = "No output was recorded for this call. Whether it was carried out is not known."
    assert messages([call("call_a"), say("user", "well?")]) == [
        assistant(None, chat_call("call_a")),
        tool("call_a", lost),
        user("well?"),
    ]


def test_output_without_call_becomes_labelled_user_message() -> None:
    image = {"type": "input_image", "image_url": PICTURE}
    items = [output(None, "42", name="meter"), output("call_x", [image])]
    assert messages(items) == [user("[Output of meter]\n42"), user([text("[Output of call_x]"), picture()])]


def test_images_in_outputs_follow_all_outputs() -> None:
    image = {"type": "input_image", "image_url": PICTURE}
    items = [
        call("call_a"),
        call("call_b"),
        output("call_a", [{"type": "input_text", "text": "see"}, {"type": "input_text", "text": "this"}, image]),
        output("call_b", [image]),
    ]
    assert messages(items) == [
        assistant(None, chat_call("call_a"), chat_call("call_b")),
        tool("call_a", "see\nthis"),
        tool("call_b", "The output follows in the next message."),
        user([text("[Output of the call call_a to look_up]"), picture()]),
        user([text("[Output of the call call_b to look_up]"), picture()]),
    ]


def test_images_stay_in_outputs_if_supported() -> None:
    image = {"type": "input_image", "image_url": PICTURE}
    turn = make_turn([call("call_a"), output("call_a", [image])])
    assert make_body(turn, Quirks(tool_images=True))["messages"][1] == tool("call_a", [picture()])


@pytest.mark.parametrize(
    ("form", "call_id", "sent"),
    [
        ("any", "x" * 64, "x" * 64),
        ("any", "", "call"),
        ("short", "call_abc", "call_abc"),
        ("short", "x" * 41, "call_3164596df4fdd018b2c567ec"),
        ("nine", "abcDEF123", "abcDEF123"),
        ("nine", "call_abc", "ed01972d3"),
    ],
)
def test_call_id_has_the_form_required_by_the_server(form: Any, call_id: str, sent: str) -> None:
    written = messages([call(call_id), output(call_id)], Quirks(call_ids=form))
    assert (written[0]["tool_calls"][0]["id"], written[1]["tool_call_id"]) == (sent, sent)


def test_user_message_after_an_output_is_separated_for_mistral() -> None:
    """NousResearch/hermes-agent#20154"""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    history = [
        say("user", "a"),
        call("call_a"),
        output("call_a"),
        say("user", "b"),
        call("call_b"),
        output("call_b", [image]),
    ]
    written = messages(history, Quirks(separate_outputs=True))
    assert [message["role"] for message in written] == [
        *("user", "assistant", "tool", "assistant", "user"),
        *("assistant", "tool", "assistant", "user"),
    ]
    assert [message["content"] for message in written if message["role"] == "assistant"] == [
        None,
        "Understood.",
        None,
        "Understood.",
    ]
