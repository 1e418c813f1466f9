"""Messages of the chat template."""

import json
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.embedded.grammar import read_rules
from antiphon.backends.embedded.prompt import build_messages, needs_examples, write_call, write_custom_call
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec

TOOL = {"type": "function", "name": "f", "description": "Do it", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "done"}
DEFAULT_SYSTEM = ("system", "You are a helpful assistant.")


def build(*items: Any, examples: bool = False, **parameters: Any) -> list[tuple[str, str]]:
    body = json.dumps({"model": "m", "input": "unread", **parameters}).encode()
    request = codec.decode_request(body).body
    turn = Turn(request=request, items=codec.decode_items(json.dumps(items).encode()))
    messages = build_messages(turn, read_rules(request), examples=examples)
    written = [(message["role"], message["content"]) for message in messages]
    return written[1:] if written[0] == DEFAULT_SYSTEM else written


def test_default_system_message_without_instructions() -> None:
    request = codec.decode_request(b'{"model": "m"}').body
    turn = Turn(request=request, items=codec.decode_items(b'[{"role": "user", "content": "Hi"}]'))
    assert build_messages(turn, read_rules(request), examples=False)[0] == {
        "role": "system",
        "content": DEFAULT_SYSTEM[1],
    }


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_instructions_and_system_messages_are_merged_first() -> None:
    items = (
        message("user", "Hi"),
        message("system", "B"),
        message("assistant", "Yo"),
        message("developer", "C"),
        message("user", "Bye"),
    )
    assert build(*items, instructions="A") == [
        ("system", "A\n\nB\n\nC"),
        ("user", "Hi"),
        ("assistant", "Yo"),
        ("user", "Bye"),
    ]


def test_call_and_result_become_assistant_and_user_messages() -> None:
    assert build(message("user", "Go"), CALL, RESULT) == [
        ("user", "Go"),
        ("assistant", write_call("f", '{"a": 1}')),
        ("user", "<tool_response>\ndone\n</tool_response>"),
    ]


def test_consecutive_messages_of_one_role_are_merged() -> None:
    call = write_call("f", '{"a": 1}')
    assert build(CALL, CALL, RESULT, RESULT) == [
        ("assistant", f"{call}\n{call}"),
        ("user", "<tool_response>\ndone\n</tool_response>\n<tool_response>\ndone\n</tool_response>"),
    ]


def test_every_text_part_type_is_read() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "No."}]
    assert build({"role": "user", "content": parts}, {"role": "assistant", "content": answer}) == [
        ("user", "a\nb"),
        ("assistant", "c\nNo."),
    ]


def test_unknown_item_is_read_as_json() -> None:
    assert build({"type": "novelty", "x": 1}) == [("user", '{"type": "novelty", "x": 1}')]


def test_invalid_json_arguments_are_quoted() -> None:
    assert build({**CALL, "arguments": "broken{"}) == [("assistant", write_call("f", '"broken{"'))]


def test_earlier_reasoning_is_omitted() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert build(message("user", "Hi"), reasoning) == [("user", "Hi")]


def test_system_message_describes_tools_and_format() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}
    ((role, text), _) = build(message("user", "Hi"), tools=[TOOL], text=form)
    assert role == "system"
    assert '{"name": "f", "description": "Do it", "parameters": {"type": "object"}}' in text
    assert "<tool_call>" in text
    assert '{"const": 1}' in text


def test_custom_tool_is_described_with_grammar_and_call_format() -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "d[468]"}
    tools = [
        {"type": "custom", "name": "dice", "description": "Roll", "format": grammar},
        {"type": "custom", "name": "n"},
    ]
    for examples in (False, True):
        text = build(message("user", "Hi"), tools=tools, examples=examples)[0][1]
        assert (
            '{"name": "dice", "description": "Roll", "input": "text that matches this regex grammar: d[468]"}\n'
            '{"name": "n", "description": "", "input": "text"}\n'
        ) in text
        assert text.endswith(write_custom_call("<name>", "<input>"))


def test_custom_call_and_result_become_messages() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "line 1\nline 2"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    assert build(message("user", "Go"), call, result) == [
        ("user", "Go"),
        ("assistant", '<tool_call>\n{"name": "c"}\nline 1\nline 2\n</tool_call>'),
        ("user", "<tool_response>\ndone\n</tool_response>"),
    ]


def test_examples_precede_history_but_not_after_a_result() -> None:
    before_call = build(message("user", "Hi"), tools=[TOOL], examples=True)
    after_result = build(message("user", "Hi"), CALL, RESULT, tools=[TOOL], examples=True)
    assert len(before_call) > 10
    assert before_call[-1] == ("user", "Hi")
    assert [role for role, _ in after_result] == ["system", "user", "assistant", "user"]


def test_examples_are_for_models_without_tool_training() -> None:
    assert needs_examples("smollm2-135m")
    assert not needs_examples("Qwen2.5-coder-1.5b")


def test_uncallable_tools_are_not_described() -> None:
    assert build(message("user", "Hi"), tools=[TOOL], tool_choice="none") == [("user", "Hi")]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0].type"),
        ({**RESULT, "output": [{"type": "input_file", "file_id": "x"}]}, "input[1].output[0].type"),
    ],
)
def test_image_or_file_is_rejected_with_param_path(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(message("user", "Hi"), item)
    assert caught.value.param == param
