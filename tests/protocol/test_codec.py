import json
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest

from antiphon.errors import InvalidRequest, MissingParameter
from antiphon.protocol import codec, validation
from antiphon.protocol.codec import (
    Decoded,
    decode_event,
    decode_item_arrays,
    decode_items,
    decode_items_lossless,
    decode_request,
    decode_response,
    encode,
)
from antiphon.protocol.events import OutputItemAdded, OutputTextDelta
from antiphon.protocol.hosted_events import AudioDone
from antiphon.protocol.items import FunctionCall, Message
from antiphon.protocol.request import CreateRequest, Include, ServiceTier
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown


def get_error(body: Any) -> tuple[str | None, str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value.param, caught.value.code, caught.value.message


def user(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", **fields}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


WRONG_TYPES = [
    ({"input": 5}, "input", "Expected `str | array`, got `int`"),
    ({"input": {}}, "input", "Expected `str | array`, got `object`"),
    ({"input": ["hi"]}, "input[0]", "Expected `object`, got `str`"),
    ({"input": [{"type": 5}]}, "input[0].type", "Expected `str | null`, got `int`"),
    (user(content=None), "input[1].content", "Expected `str | array`, got `null`"),
    (user(content=5), "input[1].content", "Expected `str | array`, got `int`"),
    (user(content=["hi"]), "input[1].content[0]", "Expected `object`, got `str`"),
    (user(content=[{"type": "input_text", "text": 5}]), "input[1].content[0].text", "Expected `str`, got `int`"),
    (user(id=7), "input[1].id", "Expected `str | null`, got `int`"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
        "input[0].arguments",
        "Expected `str`, got `object`",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]},
        "input[0].output",
        "Expected `str | array`, got `object`",
    ),
    ({"tools": {}}, "tools", "Expected `array`, got `object`"),
    (tool(parameters="{}"), "tools[0].parameters", "Expected `object | null`, got `str`"),
    (tool(strict="yes"), "tools[0].strict", "Expected `bool | null`, got `str`"),
    (
        {"tools": [{"type": "namespace", "name": "n", "description": "", "tools": [{"type": "function", "name": 1}]}]},
        "tools[0].tools[0].name",
        "Expected `str`, got `int`",
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "description": "", "tools": None}]},
        "tools[0].tools",
        "Expected `array`, got `null`",
    ),
    ({"tool_choice": 5}, "tool_choice", "Expected `str | object`, got `int`"),
    ({"temperature": "hot"}, "temperature", "Expected `float | null`, got `str`"),
    ({"max_output_tokens": 1.5}, "max_output_tokens", "Expected `int | null`, got `float`"),
    ({"stream": "yes"}, "stream", "Expected `bool | null`, got `str`"),
    ({"store": 1}, "store", "Expected `bool | null`, got `int`"),
    ({"metadata": {"k": 1}}, "metadata", "Expected `str`, got `int`"),
    ({"include": "all"}, "include", "Expected `array | null`, got `str`"),
    ({"conversation": 5}, "conversation", "Expected `str | object | null`, got `int`"),
    ({"model": ["a"]}, "model", "Expected `str | null`, got `array`"),
]
WRONG_VALUES = [
    (
        user(role="bot"),
        "input[1].role",
        "Invalid enum value 'bot'. Supported values are: 'user', 'assistant', 'system', 'developer'",
    ),
    (
        user(status="done"),
        "input[1].status",
        "Invalid enum value 'done'. Supported values are: 'in_progress', 'completed', 'incomplete'",
    ),
    (
        user(phase="draft"),
        "input[1].phase",
        "Invalid enum value 'draft'. Supported values are: 'commentary', 'final_answer'",
    ),
    (
        user(content=[{"type": "input_image", "detail": "huge"}]),
        "input[1].content[0].detail",
        "Invalid enum value 'huge'. Supported values are: 'low', 'high', 'auto', 'original'",
    ),
    (tool(name=""), "tools[0].name", "Expected `str` of length >= 1"),
    (
        {"tool_choice": "maybe"},
        "tool_choice",
        "Invalid enum value 'maybe'. Supported values are: 'none', 'auto', 'required'",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "tools": []}},
        "tool_choice.tools",
        "Expected `array` of length >= 1",
    ),
    (
        {"text": {"format": {"type": "xml"}}},
        "text.format.type",
        "Invalid value 'xml'. Supported values are: 'text', 'json_object', 'json_schema'",
    ),
    (
        {"text": {"verbosity": "loud"}},
        "text.verbosity",
        "Invalid enum value 'loud'. Supported values are: 'low', 'medium', 'high'",
    ),
    (
        {"reasoning": {"effort": "huge"}},
        "reasoning.effort",
        "Invalid enum value 'huge'. Supported values are: 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'",
    ),
    (
        {"reasoning": {"summary": "long"}},
        "reasoning.summary",
        "Invalid enum value 'long'. Supported values are: 'auto', 'concise', 'detailed'",
    ),
    (
        {"include": ["x"]},
        "include[0]",
        f"Invalid enum value 'x'. Supported values are: {', '.join(map(repr, get_args(Include)))}",
    ),
    (
        {"service_tier": "gold"},
        "service_tier",
        f"Invalid enum value 'gold'. Supported values are: {', '.join(map(repr, get_args(ServiceTier)))}",
    ),
    ({"truncation": "some"}, "truncation", "Invalid enum value 'some'. Supported values are: 'auto', 'disabled'"),
    (
        {"truncation": "a - at `$.input`"},
        "truncation",
        "Invalid enum value 'a - at `$.input`'. Supported values are: 'auto', 'disabled'",
    ),
    (
        {"type": "response.cancel"},
        "type",
        "Invalid enum value 'response.cancel'. Supported values are: 'response.create'",
    ),
    ({"temperature": 2.1}, "temperature", "Expected `float` <= 2.0"),
    ({"temperature": -0.1}, "temperature", "Expected `float` >= 0.0"),
    ({"top_p": 1.1}, "top_p", "Expected `float` <= 1.0"),
    ({"presence_penalty": -3}, "presence_penalty", "Expected `float` >= -2.0"),
    ({"top_logprobs": 21}, "top_logprobs", "Expected `int` <= 20"),
    ({"max_output_tokens": 0}, "max_output_tokens", "Expected `int` >= 1"),
    ({"max_tool_calls": 0}, "max_tool_calls", "Expected `int` >= 1"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "Expected `str` of length <= 64"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "Expected `str` of length <= 512"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "Expected `object` of length <= 16"),
    ({"safety_identifier": "x" * 129}, "safety_identifier", "Expected `str` of length <= 128"),
]
MISSING = [
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "message", "content": "hi"}]}, "input[0].role"),
    (user(content=[{"text": "hi"}]), "input[1].content[0].type"),
    (user(content=[{"type": "input_text"}]), "input[1].content[0].text"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
    ({"tool_choice": {"name": "f"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"conversation": {}}, "conversation.id"),
    ({"prompt": {}}, "prompt.id"),
]


@pytest.mark.parametrize(("body", "param", "reason"), WRONG_TYPES)
def test_wrong_type_is_rejected_with_param_path(body: Any, param: str, reason: str) -> None:
    assert get_error(body) == (param, "invalid_type", f"Invalid value for '{param}': {reason}.")


@pytest.mark.parametrize(("body", "param", "reason"), WRONG_VALUES)
def test_invalid_value_is_rejected_with_param_path(body: Any, param: str, reason: str) -> None:
    assert get_error(body) == (param, "invalid_value", f"Invalid value for '{param}': {reason}.")


@pytest.mark.parametrize(("body", "param"), MISSING)
def test_missing_field_is_rejected_with_param_path(body: Any, param: str) -> None:
    assert get_error(body) == (param, "missing_required_parameter", f"Missing required parameter: '{param}'.")


def test_missing_field_raises_missing_parameter() -> None:
    with pytest.raises(MissingParameter):
        decode_request(b'{"input":[{}]}')


NOT_JSON = [
    (b"", "The body is not valid JSON: Input data was truncated."),
    (b"{", "The body is not valid JSON: Input data was truncated."),
    (rb'{"input":"a\ud83d"}', r"The body is not valid JSON: a string has half of a surrogate pair, \ud83d."),
    (rb'{"input":"\\\\\ud83db"}', r"The body is not valid JSON: a string has half of a surrogate pair, \ud83d."),
    (rb'{"input":"\ud83d\ude00\uDE00"}', r"The body is not valid JSON: a string has half of a surrogate pair, \uDE00."),
    (rb'{"input":"\ud83d\ude00\\ud83d', "The body is not valid JSON: Input data was truncated."),
    (b'{"input":"hi"}}', "The body is not valid JSON: JSON is malformed: trailing characters (byte 15)."),
    (b'{"input":[' * 100_000, "The body is nested too deeply."),
    (b'{"input":[{"type":"x","y":' + b"[" * 100_000, "The body is nested too deeply."),
]


@pytest.mark.parametrize(("body", "message"), NOT_JSON, ids=range(len(NOT_JSON)))
def test_invalid_json_is_rejected(body: bytes, message: str) -> None:
    assert get_error(body) == (None, "invalid_json", message)


@pytest.mark.parametrize(
    "body", [b'{"input":"\xff"}', b'{"\xff":1}', b'{"input":[{"type":"acme:x","y":"\xff"}]}', b'{"tools":[{"\xc3":1}]}']
)
def test_invalid_utf8_is_rejected_even_in_unknown_fields(body: bytes) -> None:
    param, code, message = get_error(body)
    assert (param, code) == (None, "invalid_json")
    assert message.startswith("The body is not valid JSON: 'utf-8' codec can't decode byte")


@pytest.mark.parametrize(("body", "got"), [(b"[]", "array"), (b"null", "null"), (b'"hi"', "str"), (b"7", "int")])
def test_body_that_is_no_object_is_rejected(body: bytes, got: str) -> None:
    assert get_error(body) == (None, "invalid_type", f"Invalid request body: Expected `object`, got `{got}`.")


def test_long_invalid_value_is_shortened_in_message() -> None:
    _, _, message = get_error({"truncation": "x" * 10_000})
    assert len(message) < 300


def test_unknown_fields_are_ignored_and_reported() -> None:
    body = {
        "model": "m",
        "stop": ["a"],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi", "cache_control": {}}], "name": "bo"}
        ],
        "tools": [{"type": "function", "name": "f", "x y": 1}],
        "reasoning": {"effort": "low", "budget": 1},
    }
    decoded = decode_request(json.dumps(body).encode())
    plain = {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "tools": [{"type": "function", "name": "f"}],
        "reasoning": {"effort": "low"},
    }
    assert decoded.body == decode_request(json.dumps(plain).encode()).body
    assert sorted(decoded.ignored) == [
        "input[0].content[0].cache_control",
        "input[0].name",
        "reasoning.budget",
        "stop",
        "tools[0].x y",
    ]


def test_unknown_field_of_every_message_is_ignored() -> None:
    body = {"input": [{"role": "user", "content": "hi", "name": "bo"} for _ in range(1000)]}
    decoded = decode_request(json.dumps(body).encode())
    assert decoded == Decoded(
        CreateRequest(input=[Message("user", "hi")] * 1000), tuple(f"input[{n}].name" for n in range(1000))
    )


def test_too_many_distinct_unknown_fields_are_rejected() -> None:
    assert decode_request(json.dumps({f"x{n}": n for n in range(32)}).encode()).body == CreateRequest()
    assert get_error({f"x{n}": n for n in range(33)}) == ("x32", "unknown_parameter", "Unknown parameter: 'x32'.")


@pytest.mark.parametrize(
    "name", ["a` - at `$.input[5]", "a` - at `$[9]", "a` - at `$.input[0].x.y", "metadata` - at `$"]
)
def test_field_name_that_looks_like_a_path_is_rejected(name: str) -> None:
    shown = name.partition("`")[0]
    assert get_error({**user(), "metadata": {}, name: 1}) == (
        None,
        "unknown_parameter",
        f"Unknown parameter: '{shown}'.",
    )


def test_unknown_fields_of_response_are_ignored() -> None:
    body = json.loads(encode(Response(id="resp_1", created_at=1, model="m", output=[Message("assistant", "hi")])))
    body["acme"] = 1
    body["output"][0]["acme"] = 1
    body["text"]["acme"] = 1
    assert decode_response(json.dumps(body).encode()) == Response(
        id="resp_1", created_at=1, model="m", output=[Message("assistant", "hi")]
    )


def test_items_are_decoded_as_in_a_request() -> None:
    call = b'{"type":"function_call","call_id":"c","name":"f","arguments":""}'
    assert decode_items(b'[{"role":"user","content":"hi","x":1},{"type":"acme:x", "n":1e2},%b]' % call) == [
        Message("user", "hi"),
        Unknown(b'{"type":"acme:x", "n":1e2}'),
        FunctionCall("c", "f", ""),
    ]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{}", None, "invalid_type"),
        (b"[", None, "invalid_json"),
        (b'["\xff"]', None, "invalid_json"),
        (b'[{"role":"user","content":7}]', "[0].content", "invalid_type"),
    ],
)
def test_invalid_items_are_rejected_with_param_path(body: bytes, param: str | None, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_items(body)
    assert (caught.value.param, caught.value.code) == (param, code)


INVALID_ITEMS = b'[{"type":"message","role":"user","content":"hi","x":1},{"type":"file_search_call","id":"fs_1"}]'


def test_lossless_items_have_all_fields() -> None:
    assert decode_items_lossless(INVALID_ITEMS) == [
        Unknown(b'{"type":"message","role":"user","content":"hi","x":1}'),
        Unknown(b'{"type":"file_search_call","id":"fs_1"}'),
    ]


def test_invalid_item_is_decoded_as_unknown() -> None:
    assert decode_items(INVALID_ITEMS) == [Message("user", "hi"), Unknown(b'{"type":"file_search_call","id":"fs_1"}')]


def test_event_may_contain_incomplete_item() -> None:
    raw = b'{"type":"response.output_item.added","sequence_number":1,"output_index":0,"item":%b}'
    begun = b'{"type":"file_search_call","id":"fs_1"}'
    assert decode_event(raw % begun) == OutputItemAdded(1, 0, Unknown(begun))
    assert isinstance(decode_event(raw % b"{}"), Unknown)


def test_invalid_event_is_decoded_as_unknown() -> None:
    flat = b'{"type":"error","code":"x","message":"m","param":null,"sequence_number":3}'
    assert decode_event(flat) == Unknown(flat)
    assert decode_event(b"[1]") == Unknown(b"[1]")
    assert decode_event(b'{"type":7}').type == ""
    deep = b'{"type":"response.audio.done","sequence_number":%b}' % (b"[" * 100_000 + b"]" * 100_000)
    assert decode_event(deep) == Unknown(deep)


def test_unknown_field_of_event_is_ignored() -> None:
    body = b'{"type":"response.audio.done","sequence_number":3,"stream_id":"a"}'
    assert decode_event(body) == AudioDone(3)


@pytest.mark.parametrize("body", [b"", b"{", b'{"type":"response.audio.done"', b'{"type":"acme:x","y":"\xff"}'])
def test_event_that_is_not_json_raises_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"truncated|utf-8"):
        decode_event(body)


def test_encoding_other_types_raises() -> None:
    with pytest.raises(NotImplementedError, match="object is not a wire type"):
        encode(OutputTextDelta(1, "msg_1", 0, 0, object()))


IMPORT_WITH_MSGSPEC_ONLY = """
import importlib.abc, sys

allowed = {"antiphon", "msgspec"} | set(sys.stdlib_module_names)

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Blocker())
import antiphon.protocol.codec
print(sorted(name for name in sys.modules if name.startswith("antiphon.") and name.count(".") == 1))
"""


def test_protocol_imports_only_msgspec() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT_WITH_MSGSPEC_ONLY], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("['antiphon.errors', 'antiphon.protocol']\n", "")


@pytest.mark.parametrize(
    "bodies",
    [
        [],
        [b"[]"],
        [b"[]", b'[{"type":"message","role":"user","content":"h\\u00e9"}]', b"[]"],
        [b'[{"role":"user","content":"hi","x":1}]', b'[{"type":"acme:x", "n":1e2}]'],
        [INVALID_ITEMS, b'[{"type":"message","role":"user","content":"hi"}]'],
    ],
)
def test_several_arrays_are_decoded_like_single_ones(bodies: list[bytes]) -> None:
    assert decode_item_arrays(bodies) == [decode_items(body) for body in bodies]


@pytest.mark.parametrize("body", [b"", b"{", b"[],[]", b'"text"', b"[{}]", b'[{"type":"message","x":"\xff"}]'])
def test_invalid_array_among_several_raises(body: bytes) -> None:
    for bodies in ([body], [b"[]", body], [body, b"[]"]):
        with pytest.raises(InvalidRequest):
            decode_item_arrays(bodies)


def test_object_with_very_many_unknown_fields_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unknown field takes another pass over the body. So many cannot be removed."""
    passes = []
    remove_field = validation.remove_field
    monkeypatch.setattr(validation, "remove_field", lambda *given: passes.append(given) or remove_field(*given))
    fields = {f"x{number}": 1 for number in range(200)}
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_request(msgspec.json.encode({"model": "m", "input": "hi", "stream_options": fields}))
    assert (refused.value.code, len(passes)) == ("unknown_parameter", 1)
    assert str(refused.value.param).startswith("stream_options.x")


def test_long_name_of_a_model_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.decode_request(msgspec.json.encode({"model": "m" * 513, "input": "hi"}))
    assert (refused.value.param, refused.value.code) == ("model", "invalid_value")
    assert codec.decode_request(msgspec.json.encode({"model": "m" * 512, "input": "hi"})).body.model == "m" * 512
