"""Translation of items into messages and content blocks."""

import base64
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.anthropic_messages.messages import write_parts
from antiphon.backends.anthropic_messages.request import translate_request
from antiphon.backends.anthropic_messages.traits import find_traits
from antiphon.backends.base import Turn
from antiphon.errors import InvalidRequest
from antiphon.protocol import content, items
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown
from support import strategies
from support.anthropic_types import check_request

FIRST_USER_TEXT = "(The conversation begins with your own words.)"


def message(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, value: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def tool_use(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(call_id: str, words: str = "done") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": [text(words)]}


def test_instructions_move_to_system_in_order(write_body: Any) -> None:
    body = write_body(
        message("user", "Hi"),
        message("system", "B"),
        message("assistant", "Yo"),
        message("developer", "C"),
        message("user", "Bye"),
        instructions="A",
    )
    assert body["system"] == [text("A"), text("B"), text("C")]
    assert body["messages"] == [
        message("user", [text("Hi")]),
        message("assistant", [text("Yo")]),
        message("user", [text("Bye")]),
    ]


def test_image_in_instructions_becomes_user_content(write_body: Any) -> None:
    picture = {"type": "input_image", "image_url": "https://example.com/a.png"}
    body = write_body(message("developer", [{"type": "input_text", "text": "Like this:"}, picture]))
    assert body["system"] == [text("Like this:")]
    assert body["messages"][0]["content"][0]["type"] == "image"


def test_invalid_instruction_part_is_named_by_param_path(write_body: Any) -> None:
    picture = {"type": "input_image", "image_url": "file:///etc/passwd"}
    with pytest.raises(InvalidRequest) as caught:
        write_body(message("developer", [{"type": "input_text", "text": "Like this:"}, picture]))
    assert caught.value.param == "input[0].content[1].image_url"


def test_consecutive_items_of_one_role_are_one_message(write_body: Any) -> None:
    body = write_body(
        message("user", "A"),
        message("user", "B"),
        message("assistant", "C"),
        call("1"),
        output("1"),
        message("user", "D"),
    )
    assert body["messages"] == [
        message("user", [text("A"), text("B")]),
        message("assistant", [text("C"), tool_use("1")]),
        message("user", [tool_result("1"), text("D")]),
    ]


def test_results_start_the_message_after_their_calls(write_body: Any) -> None:
    body = write_body(
        message("user", "Go"),
        call("1"),
        call("2"),
        message("user", "Wait"),
        output("2", "b"),
        message("assistant", "Ok"),
        output("1", "a"),
    )
    assert body["messages"] == [
        message("user", [text("Go")]),
        message("assistant", [tool_use("1"), tool_use("2")]),
        message("user", [tool_result("2", "b"), tool_result("1", "a"), text("Wait")]),
        message("assistant", [text("Ok")]),
        message("user", [text("Continue.")]),
    ]


def test_call_without_result_gets_placeholder_result(write_body: Any) -> None:
    note = "No output was recorded for this call. Whether it was carried out is not known."
    assert write_body(message("user", "Go"), call("1"))["messages"][-1] == message("user", [tool_result("1", note)])


def test_result_without_call_becomes_json_text(write_body: Any) -> None:
    (block,) = write_body(output("nobody", "lost"))["messages"][0]["content"]
    assert json.loads(block["text"]) == output("nobody", "lost")


def test_second_result_of_a_call_becomes_json_text(write_body: Any) -> None:
    blocks = write_body(call("1"), output("1", "a"), output("1", "b"))["messages"][-1]["content"]
    assert blocks[0] == tool_result("1", "a")
    assert json.loads(blocks[1]["text"]) == output("1", "b")


def test_repeated_call_ids_are_numbered(write_body: Any) -> None:
    body = write_body(call("1"), output("1", "a"), call("1"), call("1_2"), output("1", "b"), output("1_2", "c"))
    assert body["messages"][1:] == [
        message("assistant", [tool_use("1")]),
        message("user", [tool_result("1", "a")]),
        message("assistant", [tool_use("1_2"), tool_use("1_2_2")]),
        message("user", [tool_result("1_2", "b"), tool_result("1_2_2", "c")]),
    ]


def test_invalid_ids_and_names_get_substitutes(write_body: Any) -> None:
    body = write_body(call("call:1|x", "files.read"), output("call:1|x"))
    (used,), (answered,) = body["messages"][1]["content"], body["messages"][2]["content"]
    assert used["id"] == answered["tool_use_id"] == "call_1_x_ccd6176e"
    assert used["name"] == body["tools"][0]["name"] == "files_read_601e4eb6"


def test_history_of_assistant_only_gets_user_messages(write_body: Any) -> None:
    assert write_body(message("assistant", "Well,"))["messages"] == [
        message("user", [text(FIRST_USER_TEXT)]),
        message("assistant", [text("Well,")]),
        message("user", [text("Continue.")]),
    ]


def test_turn_without_items_has_one_user_message(write_body: Any) -> None:
    assert write_body(instructions="Say hello.")["messages"] == [message("user", [text("Continue.")])]


def test_blank_texts_are_omitted(write_body: Any) -> None:
    body = write_body(
        message("system", " "),
        message("user", ""),
        message("user", "Hi"),
        message("assistant", "\n"),
        call("1"),
        output("1", ""),
    )
    assert "system" not in body
    assert body["messages"] == [
        message("user", [text("Hi")]),
        message("assistant", [tool_use("1")]),
        message("user", [{"type": "tool_result", "tool_use_id": "1"}]),
    ]


def test_arguments_are_sent_unchanged() -> None:
    arguments = '{ "b":1.0,"a" : 1e2, "c":"\\u0041" }'
    request = CreateRequest(model="claude-sonnet-4-5")
    turn = Turn(request=request, items=[items.FunctionCall("1", "f", arguments)])
    assert arguments.encode() in msgspec.json.encode(translate_request(turn, find_traits("claude-sonnet-4-5")).body)


def test_arguments_other_than_objects_are_wrapped(write_body: Any) -> None:
    body = write_body(call("1", arguments="[1]"), call("2", arguments='{"a'), call("3", arguments=""))
    assert [block["input"] for block in body["messages"][1]["content"]] == [
        {"arguments": "[1]"},
        {"arguments": '{"a'},
        {},
    ]


def test_images_in_results_become_image_blocks(write_body: Any) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    body = write_body(call("1"), output("1", [{"type": "input_text", "text": "Look:"}, picture]))
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    assert body["messages"][-1]["content"][0]["content"] == [text("Look:"), {"type": "image", "source": source}]


def test_unknown_items_become_json_text(write_body: Any) -> None:
    strange = {"type": "acme:note", "text": "important"}
    assert json.loads(write_body(strange)["messages"][0]["content"][0]["text"]) == strange


# Thinking

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln/+=="}
REDACTED = {"type": "redacted_thinking", "data": "EmwK"}


def reasoning(*blocks: Any) -> dict[str, Any]:
    sealed = json.dumps(blocks)
    return {"type": "reasoning", "summary": [], "encrypted_content": sealed}


def test_thinking_is_sent_unchanged_before_its_call(write_body: Any) -> None:
    body = write_body(
        message("user", "Go"), reasoning(THOUGHT, REDACTED), call("1"), reasoning(REDACTED), call("2"), output("1"),
        output("2"),
    )  # fmt: skip
    assert body["messages"][1] == message("assistant", [THOUGHT, REDACTED, tool_use("1"), REDACTED, tool_use("2")])


def test_reasoning_of_another_backend_is_omitted(write_body: Any) -> None:
    foreign = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert write_body(message("user", "Go"), foreign, call("1"))["messages"][1] == message("assistant", [tool_use("1")])


@given(st.text(), st.text(), st.text())
def test_thinking_round_trips_byte_for_byte(thinking: str, signature: str, data: str) -> None:
    blocks = [
        {"type": "thinking", "thinking": thinking, "signature": signature},
        {"type": "redacted_thinking", "data": data},
    ]
    raw = msgspec.json.encode(blocks)
    turn = Turn(request=CreateRequest(model="claude-opus-5"), items=[items.Reasoning(encrypted_content=raw.decode())])
    body = msgspec.json.encode(translate_request(turn, find_traits("claude-opus-5")).body)
    assert raw[1:-1] in body


# Invariant: every item of any history appears in the messages, in order, and the API accepts the messages.

# Characters that JSON does not escape, so the tests can search for them in encoded text.
_texts = st.text("aß漢😀", max_size=4).map(lambda word: f"<{word}>")
_picture = st.builds(content.InputImage, image_url=_texts.map(lambda word: f"https://example.com/{word}"))
_contents = _texts | st.lists(_texts.map(content.InputText) | _picture, min_size=1, max_size=2)
_ids = st.sampled_from(["1", "2", "call|3"])
_arguments = _texts.map(lambda word: json.dumps({"a": word}, ensure_ascii=False))
_histories = st.lists(
    st.one_of(
        st.builds(items.Message, st.just("user"), _contents),
        st.builds(items.Message, st.just("assistant"), _texts),
        st.builds(items.Message, st.sampled_from(["system", "developer"]), _texts),
        st.builds(items.FunctionCall, _ids, st.sampled_from(["f", "g.h"]), _arguments),
        st.builds(items.FunctionCallOutput, _contents, _ids),
        st.builds(items.Reasoning, encrypted_content=st.just(json.dumps([THOUGHT]))),
    ),
    max_size=8,
)


@given(_histories)
def test_every_item_is_sent_and_roles_alternate(history: list[Any]) -> None:
    translated = translate_request(
        Turn(request=CreateRequest(model="claude-sonnet-4-5"), items=history), find_traits("claude-sonnet-4-5")
    )
    body = check_request(msgspec.json.encode(translated.body))
    messages = body["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    _check_calls(messages)
    assert [block["text"] for block in body.get("system", ())] == _list_history_texts(history, "system", "developer")
    assert _list_texts(messages, "user") == _list_history_texts(history, "user")
    assert _list_texts(messages, "assistant") == _list_history_texts(history, "assistant")
    assert _list_calls(messages, translated.tool_names) == [
        (item.name, item.arguments) for item in history if isinstance(item, items.FunctionCall)
    ]
    encoded = json.dumps(messages, ensure_ascii=False)
    results = [word for item in history if isinstance(item, items.FunctionCallOutput) for word in _read(item.output)]
    assert all(encoded.count(word) >= results.count(word) for word in results)
    assert encoded.count(THOUGHT["signature"]) == sum(isinstance(item, items.Reasoning) for item in history)


def _check_calls(messages: list[dict[str, Any]]) -> None:
    """Check that each call has one result at the start of the next message, and that call ids are unique."""
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


def _list_history_texts(history: list[Any], *roles: str) -> list[str]:
    messages = [item for item in history if isinstance(item, items.Message) and item.role in roles]
    return [word for message in messages for word in _read(message.content)]


def _list_texts(messages: list[dict[str, Any]], role: str) -> list[str]:
    """Return the role's own texts: no tool results, no JSON, and no added first or last message."""
    blocks = [block for message in messages if message["role"] == role for block in message["content"]]
    texts = [block.get("text") or block.get("source", {}).get("url") for block in blocks]
    return [each for each in texts if each and each not in (FIRST_USER_TEXT, "Continue.") and not each.startswith("{")]


def _list_calls(messages: list[dict[str, Any]], names: dict[str, str]) -> list[tuple[str, str]]:
    blocks = [block for message in messages for block in message["content"] if block["type"] == "tool_use"]
    return [(names[block["name"]], json.dumps(block["input"], ensure_ascii=False)) for block in blocks]


@given(st.lists(strategies.all_items(), max_size=4))
def test_any_items_become_valid_request_or_named_error(history: list[Any]) -> None:
    turn = Turn(request=CreateRequest(model="claude-sonnet-4-5"), items=history)
    error = body = None
    try:
        body = translate_request(turn, find_traits("claude-sonnet-4-5")).body
    except InvalidRequest as raised:
        error = raised
    if error is not None:
        assert (error.param or "").startswith("input[")
    else:
        check_request(msgspec.json.encode(body))


# Content blocks

PDF = base64.b64encode(b"%PDF-1.7 and so on").decode()
TEXT = base64.b64encode("Grüße".encode()).decode()


def write_block(part: Any) -> Any:
    (block,) = write_parts([part], "input[0].content")
    return block


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (
            content.InputImage(image_url="data:image/png;base64,AAAA"),
            {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        ),
        (
            content.InputImage(image_url="DATA:image/jpg;name=x;base64,AAAA"),
            {"type": "base64", "media_type": "image/jpeg", "data": "AAAA"},
        ),
        (
            content.InputImage(image_url="https://example.com/a.png"),
            {"type": "url", "url": "https://example.com/a.png"},
        ),
        (content.ComputerScreenshot(file_id="file_1"), {"type": "file", "file_id": "file_1"}),
    ],
)
def test_image_becomes_image_block(part: Any, source: Any) -> None:
    assert write_block(part) == {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (
            content.InputFile(file_data=f"data:application/pdf;base64,{PDF}", filename="a.pdf"),
            {
                "type": "document",
                "title": "a.pdf",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
            },
        ),
        (
            content.InputFile(file_data=PDF),
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        ),
        (
            content.InputFile(file_data=TEXT, filename="notes.md"),
            {
                "type": "document",
                "title": "notes.md",
                "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"},
            },
        ),
        (
            content.InputFile(file_data=TEXT),
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Grüße"}},
        ),
        (
            content.InputFile(file_url="https://example.com/a.pdf"),
            {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}},
        ),
        (
            content.InputFile(file_id="file_1"),
            {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
        ),
        (
            content.InputFile(file_data="AAAA", filename="a.png"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ),
    ],
)
def test_file_becomes_document_or_image_block(part: Any, block: Any) -> None:
    assert write_block(part) == block


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        (content.InputImage(image_url="data:image/svg+xml;base64,AAAA"), ".image_url", "unsupported_image_media_type"),
        (content.InputImage(image_url="file:///etc/passwd"), ".image_url", "invalid_image_url"),
        (content.InputImage(), "", "invalid_value"),
        (content.InputFile(), "", "invalid_value"),
        (content.InputFile(file_data="not base64"), ".file_data", "invalid_value"),
        (content.InputFile(file_data="\x80"), ".file_data", "invalid_value"),
        (content.InputFile(file_data="AAAA", filename="a.docx"), ".file_data", "unsupported_file"),
        (content.InputFile(file_data="/w==", filename="a.txt"), ".file_data", "unsupported_file"),
        (content.InputAudio(content.AudioData("AAAA", "wav")), "", "unsupported_content"),
        (content.InputVideo("https://example.com/a.mp4"), "", "unsupported_content"),
    ],
)
def test_unsupported_part_is_rejected_with_param_path(part: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        write_block(part)
    assert (caught.value.param, caught.value.code) == (f"input[0].content[0]{param}", code)


def test_unknown_part_becomes_json_text() -> None:
    assert write_block(Unknown(b'{"type":"acme:smell"}')) == {"type": "text", "text": '{"type":"acme:smell"}'}


def test_image_of_the_assistant_follows_in_a_user_message(write_body: Any) -> None:
    image = {"type": "input_image", "image_url": "https://x/y"}
    parts = [{"type": "output_text", "text": "Yes"}, image, {"type": "refusal", "refusal": "No"}]
    assert write_body(message("user", "Go"), message("assistant", parts), call("1"), output("1"))["messages"] == [
        message("user", [text("Go")]),
        message("assistant", [text("Yes"), text("No")]),
        message(
            "user",
            [
                text("[Attached to the assistant message]"),
                {"type": "image", "source": {"type": "url", "url": "https://x/y"}},
            ],
        ),
        message("assistant", [tool_use("1")]),
        message("user", [tool_result("1")]),
    ]
