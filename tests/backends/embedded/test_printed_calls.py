"""Recognition of calls that a model prints as text."""

import json
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.embedded.printed_calls import CallForms, requests_code
from antiphon.protocol import codec
from antiphon.protocol.items import Message

FORMS = CallForms(["get_weather", "get_time", "naïve tool"])
PRINTED = [
    ('{"name": "get_weather", "arguments": {"city": "Paris"}}', "get_weather"),
    ('```json\n{"name": "get_weather", "arguments": {}}\n```', "get_weather"),
    ('```\n{\n  "name": "get_time",\n  "arguments": {}\n}\n```', "get_time"),
    ('```tool_call\n{"tool": "get_time"}', "get_time"),
    ('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>', "get_time"),
    ('<function_call>\n{"name":"get_time"', "get_time"),
    ('<tools>\n[{"name": "get_time"', "get_time"),
    ('{"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}', "get_weather"),
    ('{"type": "function", "name": "get_weather", "parameters": {}}', "get_weather"),
    ('{"function": {"name": "get_weather"}}', "get_weather"),
    ('{"function": "get_weather", "args": {}}', "get_weather"),
    ('\n [{"name": "get_weather", "arguments": {}}]', "get_weather"),
    ('{"name": "naïve tool", "arguments": {}}', "naïve tool"),
    ('get_weather(city="Paris")', "get_weather"),
    ('```python\nget_weather(city="Paris")\n```', "get_weather"),
    ("[get_time('Lima')]", "get_time"),
]
TEXTS = [
    "Hello!",
    "Hello (world)",
    '{"name": "Ann", "age": 30}',
    '{"name": "get_weathers", "arguments": {}}',
    '{"city": "Paris", "name": "get_weather"}',
    '```json\n{"name": "Ann"}\n```',
    '```python\nprint("get_weather(")\n```',
    "get_weather is a tool that returns the weather.",
    "get the weather",
    "<b>bold</b>",
    "<tool_calls>",
    "[1, 2, 3]",
    "`code`",
    "- get_time()",
    'Call {"name": "get_time"}',
]


@pytest.mark.parametrize(("text", "name"), PRINTED)
def test_printed_call_is_found_as_soon_as_its_name_is_complete(text: str, name: str) -> None:
    found = [FORMS.find_tool(text[:end]) for end in range(len(text) + 1)]
    first = found.index(name)
    assert set(found[:first]) == {None}
    assert set(found[first:]) == {name}
    assert all(FORMS.may_be_call(text[:end]) for end in range(first))


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text_is_not_a_call(text: str) -> None:
    assert not any(FORMS.find_tool(text[:end]) for end in range(len(text) + 1))
    assert not FORMS.may_be_call(text)


@pytest.mark.parametrize(
    "text", ["Hello!", "The weather", "I can help.", "1. First", "- a", "# Title", "日本", '"name"']
)
def test_first_character_of_a_text_rules_out_a_call(text: str) -> None:
    assert not FORMS.may_be_call(text[0])


def test_nothing_is_a_call_without_tools() -> None:
    assert CallForms([]).find_tool('{"name": "get_time"') is None


def make_turn(input: Any, **parameters: Any) -> Turn:
    request = codec.decode_request(json.dumps({"model": "m", "input": input, **parameters}).encode()).body
    items = [Message("user", request.input)] if isinstance(request.input, str) else request.input
    return Turn(request=request, items=items or [])


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (make_turn("What is the weather in Paris?"), False),
        (make_turn("Write the JSON of a call of get_weather."), True),
        (make_turn([{"role": "user", "content": [{"type": "input_text", "text": "Show me a Python call."}]}]), True),
        (make_turn("Hello", instructions="Answer with code only."), True),
        (make_turn([{"role": "assistant", "content": "Here is JSON."}, {"role": "user", "content": "Thanks"}]), False),
    ],
)
def test_messages_that_mention_code_are_found(turn: Turn, expected: bool) -> None:
    assert requests_code(turn) is expected
