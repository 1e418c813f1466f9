import json
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.embedded.grammar import read_rules
from antiphon.backends.embedded.prompt import lay_out, write_call, write_custom_call
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec

TOOL = {"type": "function", "name": "f", "description": "Do it", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "done"}


GREETING = ("system", "You are a helpful assistant.")


def lay(*items: Any, examples: bool = False, **parameters: Any) -> list[tuple[str, str]]:
    body = json.dumps({"model": "m", "input": "unread", **parameters}).encode()
    request = codec.decode_request(body).request
    turn = Turn(request=request, items=codec.decode_items(json.dumps(items).encode()))
    messages = lay_out(turn, read_rules(request), examples=examples)
    spoken = [(message["role"], message["content"]) for message in messages]
    return spoken[1:] if spoken[0] == GREETING else spoken


def test_a_model_that_was_told_nothing_is_told_to_be_helpful() -> None:
    request = codec.decode_request(b'{"model": "m"}').request
    turn = Turn(request=request, items=codec.decode_items(b'[{"role": "user", "content": "Hi"}]'))
    assert lay_out(turn, read_rules(request), examples=False)[0] == {"role": "system", "content": GREETING[1]}


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_instructions_system_and_developer_become_one_message_at_the_front() -> None:
    items = say("user", "Hi"), say("system", "B"), say("assistant", "Yo"), say("developer", "C"), say("user", "Bye")
    assert lay(*items, instructions="A") == [
        ("system", "A\n\nB\n\nC"),
        ("user", "Hi"),
        ("assistant", "Yo"),
        ("user", "Bye"),
    ]


def test_a_call_and_its_result_are_turns_of_assistant_and_user() -> None:
    assert lay(say("user", "Go"), CALL, RESULT) == [
        ("user", "Go"),
        ("assistant", write_call("f", '{"a": 1}')),
        ("user", "<tool_response>\ndone\n</tool_response>"),
    ]


def test_what_one_side_says_in_a_row_becomes_one_message() -> None:
    call = write_call("f", '{"a": 1}')
    assert lay(CALL, CALL, RESULT, RESULT) == [
        ("assistant", f"{call}\n{call}"),
        ("user", "<tool_response>\ndone\n</tool_response>\n<tool_response>\ndone\n</tool_response>"),
    ]


def test_every_kind_of_text_is_read() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "No."}]
    assert lay({"role": "user", "content": parts}, {"role": "assistant", "content": answer}) == [
        ("user", "a\nb"),
        ("assistant", "c\nNo."),
    ]


def test_what_is_not_known_is_read_as_it_is() -> None:
    assert lay({"type": "novelty", "x": 1}) == [("user", '{"type": "novelty", "x": 1}')]


def test_arguments_that_are_no_json_are_quoted() -> None:
    assert lay({**CALL, "arguments": "broken{"}) == [("assistant", write_call("f", '"broken{"'))]


def test_earlier_reasoning_is_not_read_again() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert lay(say("user", "Hi"), reasoning) == [("user", "Hi")]


def test_tools_and_format_are_described_in_the_system_message() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}
    ((role, text), _) = lay(say("user", "Hi"), tools=[TOOL], text=form)
    assert role == "system"
    assert '{"name": "f", "description": "Do it", "parameters": {"type": "object"}}' in text
    assert "<tool_call>" in text
    assert '{"const": 1}' in text


def test_a_custom_tool_is_described_with_its_grammar_and_how_to_call_it() -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "d[468]"}
    tools = [
        {"type": "custom", "name": "dice", "description": "Roll", "format": grammar},
        {"type": "custom", "name": "n"},
    ]
    for examples in (False, True):
        text = lay(say("user", "Hi"), tools=tools, examples=examples)[0][1]
        assert (
            '{"name": "dice", "description": "Roll", "input": "text that matches this regex grammar: d[468]"}\n'
            '{"name": "n", "description": "", "input": "text"}\n'
        ) in text
        assert text.endswith(write_custom_call("<name>", "<input>"))


def test_a_custom_call_and_its_result_are_turns_of_assistant_and_user() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "line 1\nline 2"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    assert lay(say("user", "Go"), call, result) == [
        ("user", "Go"),
        ("assistant", '<tool_call>\n{"name": "c"}\nline 1\nline 2\n</tool_call>'),
        ("user", "<tool_response>\ndone\n</tool_response>"),
    ]


def test_examples_come_before_the_conversation_but_not_after_a_result() -> None:
    asked = lay(say("user", "Hi"), tools=[TOOL], examples=True)
    told = lay(say("user", "Hi"), CALL, RESULT, tools=[TOOL], examples=True)
    assert len(asked) > 10
    assert asked[-1] == ("user", "Hi")
    assert [role for role, _ in told] == ["system", "user", "assistant", "user"]


def test_tools_that_may_not_be_called_are_not_described() -> None:
    assert lay(say("user", "Hi"), tools=[TOOL], tool_choice="none") == [("user", "Hi")]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0].type"),
        ({**RESULT, "output": [{"type": "input_file", "file_id": "x"}]}, "input[1].output[0].type"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(item: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        lay(say("user", "Hi"), item)
    assert refusal.value.param == place
