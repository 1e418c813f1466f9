"""Which messages a history becomes."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.backends.anthropic_messages.request import compose
from antiphon.backends.anthropic_messages.traits import find_traits
from antiphon.backends.base import Turn
from antiphon.errors import InvalidRequest
from antiphon.protocol import content, items
from antiphon.protocol.request import CreateRequest
from support import strategies
from support.anthropic_types import check_request

OPENING = "(The conversation begins with your own words.)"


def say(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def answer(call_id: str, words: str = "done") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": [text(words)]}


def test_all_instructions_stand_in_front_in_their_order(write: Any) -> None:
    body = write(
        say("user", "Hi"), say("system", "B"), say("assistant", "Yo"), say("developer", "C"), say("user", "Bye"),
        instructions="A",
    )  # fmt: skip
    assert body["system"] == [text("A"), text("B"), text("C")]
    assert body["messages"] == [say("user", [text("Hi")]), say("assistant", [text("Yo")]), say("user", [text("Bye")])]


def test_an_image_among_instructions_is_shown_where_it_stood(write: Any) -> None:
    picture = {"type": "input_image", "image_url": "https://example.com/a.png"}
    body = write(say("developer", [{"type": "input_text", "text": "Like this:"}, picture]))
    assert body["system"] == [text("Like this:")]
    assert body["messages"][0]["content"][0]["type"] == "image"


def test_a_part_of_instructions_that_cannot_be_said_is_named_by_its_place(write: Any) -> None:
    picture = {"type": "input_image", "image_url": "file:///etc/passwd"}
    with pytest.raises(InvalidRequest) as caught:
        write(say("developer", [{"type": "input_text", "text": "Like this:"}, picture]))
    assert caught.value.param == "input[0].content[1].image_url"


def test_what_one_side_says_in_a_row_is_one_message(write: Any) -> None:
    body = write(say("user", "A"), say("user", "B"), say("assistant", "C"), call("1"), result("1"), say("user", "D"))
    assert body["messages"] == [
        say("user", [text("A"), text("B")]),
        say("assistant", [text("C"), use("1")]),
        say("user", [answer("1"), text("D")]),
    ]


def test_the_results_of_a_message_stand_first_in_the_next_one_in_their_order(write: Any) -> None:
    body = write(
        say("user", "Go"), call("1"), call("2"), say("user", "Wait"), result("2", "b"), say("assistant", "Ok"),
        result("1", "a"),
    )  # fmt: skip
    assert body["messages"] == [
        say("user", [text("Go")]),
        say("assistant", [use("1"), use("2")]),
        say("user", [answer("2", "b"), answer("1", "a"), text("Wait")]),
        say("assistant", [text("Ok")]),
        say("user", [text("Continue.")]),
    ]


def test_a_call_without_a_result_gets_a_note(write: Any) -> None:
    note = "No output was recorded for this call. Whether it was carried out is not known."
    assert write(say("user", "Go"), call("1"))["messages"][-1] == say("user", [answer("1", note)])


def test_a_result_without_a_call_is_told_as_json(write: Any) -> None:
    (block,) = write(result("nobody", "lost"))["messages"][0]["content"]
    assert json.loads(block["text"]) == result("nobody", "lost")


def test_a_second_result_of_a_call_is_told_as_json(write: Any) -> None:
    blocks = write(call("1"), result("1", "a"), result("1", "b"))["messages"][-1]["content"]
    assert blocks[0] == answer("1", "a")
    assert json.loads(blocks[1]["text"]) == result("1", "b")


def test_ids_that_come_again_are_told_apart(write: Any) -> None:
    body = write(call("1"), result("1", "a"), call("1"), call("1_2"), result("1", "b"), result("1_2", "c"))
    assert body["messages"][1:] == [
        say("assistant", [use("1")]),
        say("user", [answer("1", "a")]),
        say("assistant", [use("1_2"), use("1_2_2")]),
        say("user", [answer("1_2", "b"), answer("1_2_2", "c")]),
    ]


def test_ids_and_names_with_other_characters_get_substitutes(write: Any) -> None:
    body = write(call("call:1|x", "files.read"), result("call:1|x"))
    (used,), (answered,) = body["messages"][1]["content"], body["messages"][2]["content"]
    assert used["id"] == answered["tool_use_id"] == "call_1_x_ccd6176e"
    assert used["name"] == body["tools"][0]["name"] == "files_read_601e4eb6"


def test_a_history_that_begins_or_ends_with_the_assistant_is_framed(write: Any) -> None:
    assert write(say("assistant", "Well,"))["messages"] == [
        say("user", [text(OPENING)]),
        say("assistant", [text("Well,")]),
        say("user", [text("Continue.")]),
    ]


def test_a_turn_without_items_is_still_a_turn(write: Any) -> None:
    assert write(instructions="Say hello.")["messages"] == [say("user", [text("Continue.")])]


def test_texts_with_nothing_to_read_are_left_out(write: Any) -> None:
    body = write(
        say("system", " "), say("user", ""), say("user", "Hi"), say("assistant", "\n"), call("1"), result("1", "")
    )
    assert "system" not in body
    assert body["messages"] == [
        say("user", [text("Hi")]),
        say("assistant", [use("1")]),
        say("user", [{"type": "tool_result", "tool_use_id": "1"}]),
    ]


def test_arguments_are_given_back_as_they_were_written() -> None:
    arguments = '{ "b":1.0,"a" : 1e2, "c":"\\u0041" }'
    request = CreateRequest(model="claude-sonnet-4-5")
    turn = Turn(request=request, items=[items.FunctionCall("1", "f", arguments)])
    assert arguments.encode() in msgspec.json.encode(compose(turn, find_traits("claude-sonnet-4-5")).body)


def test_arguments_that_are_no_object_are_given_back_as_text(write: Any) -> None:
    body = write(call("1", arguments="[1]"), call("2", arguments='{"a'), call("3", arguments=""))
    assert [block["input"] for block in body["messages"][1]["content"]] == [
        {"arguments": "[1]"},
        {"arguments": '{"a'},
        {},
    ]


def test_images_within_results_are_shown(write: Any) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    body = write(call("1"), result("1", [{"type": "input_text", "text": "Look:"}, picture]))
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert body["messages"][-1]["content"][0]["content"] == [text("Look:"), {"type": "image", "source": source}]


def test_items_of_other_kinds_are_told_as_json(write: Any) -> None:
    strange = {"type": "acme:note", "text": "important"}
    assert json.loads(write(strange)["messages"][0]["content"][0]["text"]) == strange


# Thinking

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln/+=="}
REDACTED = {"type": "redacted_thinking", "data": "EmwK"}


def reasoning(*blocks: Any) -> dict[str, Any]:
    sealed = json.dumps(blocks)
    return {"type": "reasoning", "summary": [], "encrypted_content": sealed}


def test_thinking_goes_back_exactly_before_the_call_it_led_to(write: Any) -> None:
    body = write(
        say("user", "Go"), reasoning(THOUGHT, REDACTED), call("1"), reasoning(REDACTED), call("2"), result("1"),
        result("2"),
    )  # fmt: skip
    assert body["messages"][1] == say("assistant", [THOUGHT, REDACTED, use("1"), REDACTED, use("2")])


def test_reasoning_of_another_backend_is_left_out(write: Any) -> None:
    foreign = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert write(say("user", "Go"), foreign, call("1"))["messages"][1] == say("assistant", [use("1")])


@given(st.text(), st.text(), st.text())
def test_thinking_round_trips_byte_for_byte(thinking: str, signature: str, data: str) -> None:
    blocks = [
        {"type": "thinking", "thinking": thinking, "signature": signature},
        {"type": "redacted_thinking", "data": data},
    ]
    raw = msgspec.json.encode(blocks)
    turn = Turn(request=CreateRequest(model="claude-opus-5"), items=[items.Reasoning(encrypted_content=raw.decode())])
    body = msgspec.json.encode(compose(turn, find_traits("claude-opus-5")).body)
    assert raw[1:-1] in body


# The law: whatever the history, everything in it is told, in order, and the messages are ones that the API takes.

# Letters that JSON never spells otherwise, so that they can be looked for anywhere in it.
_words = st.text("aß漢😀", max_size=4).map(lambda word: f"<{word}>")
_picture = st.builds(content.InputImage, image_url=_words.map(lambda word: f"https://example.com/{word}"))
_contents = _words | st.lists(_words.map(content.InputText) | _picture, min_size=1, max_size=2)
_ids = st.sampled_from(["1", "2", "call|3"])
_arguments = _words.map(lambda word: json.dumps({"a": word}, ensure_ascii=False))
_histories = st.lists(
    st.one_of(
        st.builds(items.Message, st.just("user"), _contents),
        st.builds(items.Message, st.just("assistant"), _words),
        st.builds(items.Message, st.sampled_from(["system", "developer"]), _words),
        st.builds(items.FunctionCall, _ids, st.sampled_from(["f", "g.h"]), _arguments),
        st.builds(items.FunctionCallOutput, _contents, _ids),
        st.builds(items.Reasoning, encrypted_content=st.just(json.dumps([THOUGHT]))),
    ),
    max_size=8,
)


@settings(max_examples=150)
@given(_histories)
def test_nothing_is_lost_and_the_sides_take_turns(history: list[Any]) -> None:
    composition = compose(
        Turn(request=CreateRequest(model="claude-sonnet-4-5"), items=history), find_traits("claude-sonnet-4-5")
    )
    body = check_request(msgspec.json.encode(composition.body))
    messages = body["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    _check_calls(messages)
    assert [block["text"] for block in body.get("system", ())] == _say_all(history, "system", "developer")
    assert _list_spoken(messages, "user") == _say_all(history, "user")
    assert _list_spoken(messages, "assistant") == _say_all(history, "assistant")
    assert _list_used(messages, composition.names) == [
        (item.name, item.arguments) for item in history if isinstance(item, items.FunctionCall)
    ]
    said = json.dumps(messages, ensure_ascii=False)
    results = [word for item in history if isinstance(item, items.FunctionCallOutput) for word in _read(item.output)]
    assert all(said.count(word) >= results.count(word) for word in results)
    assert said.count(THOUGHT["signature"]) == sum(isinstance(item, items.Reasoning) for item in history)


def _check_calls(messages: list[dict[str, Any]]) -> None:
    """Each call is answered once, at the start of the next message, and no two have one id."""
    ids: list[str] = []
    for message, following in itertools.pairwise(messages):
        called = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        answered = [block.get("tool_use_id") for block in following["content"]]
        if message["role"] == "assistant":
            assert sorted(answered[: len(called)]) == sorted(called)
            assert not any(answered[len(called) :])
        ids += called
    assert len(ids) == len(set(ids))


def _read(parts: Any) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    return [part.text if isinstance(part, content.InputText) else part.image_url for part in parts]


def _say_all(history: list[Any], *roles: str) -> list[str]:
    messages = [item for item in history if isinstance(item, items.Message) and item.role in roles]
    return [word for message in messages for word in _read(message.content)]


def _list_spoken(messages: list[dict[str, Any]], role: str) -> list[str]:
    """What this side says itself: no results, no lone results, and not the words that frame a history."""
    blocks = [block for message in messages if message["role"] == role for block in message["content"]]
    texts = [block.get("text") or block.get("source", {}).get("url") for block in blocks]
    return [each for each in texts if each and each not in (OPENING, "Continue.") and not each.startswith("{")]


def _list_used(messages: list[dict[str, Any]], names: dict[str, str]) -> list[tuple[str, str]]:
    blocks = [block for message in messages for block in message["content"] if block["type"] == "tool_use"]
    return [(names[block["name"]], json.dumps(block["input"], ensure_ascii=False)) for block in blocks]


@settings(max_examples=100)
@given(st.lists(strategies.all_items(), max_size=4))
def test_any_items_become_a_request_or_a_clear_error(history: list[Any]) -> None:
    turn = Turn(request=CreateRequest(model="claude-sonnet-4-5"), items=history)
    error = body = None
    try:
        body = compose(turn, find_traits("claude-sonnet-4-5")).body
    except InvalidRequest as raised:
        error = raised
    if error is not None:
        assert (error.param or "").startswith("input[")
    else:
        check_request(msgspec.json.encode(body))
