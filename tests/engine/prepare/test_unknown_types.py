"""Items and parts of other APIs are refused, and unknown ones are named in a warning."""

from typing import Any

import msgspec
import pytest

from antiphon.engine.prepare.unknown_types import check_unknown_types
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import ITEMS


def decode(*items: dict[str, Any]) -> Any:
    return ITEMS.decode_list(msgspec.json.encode(items))


def say(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See."}, *parts]}


def give(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": list(parts)}


URL = {"url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    ("item", "path", "advice"),
    [
        (say({"type": "image_url", "image_url": URL}), "content[1]", "use a part of type 'input_image'"),
        (say({"type": "image", "source": {"type": "url"} | URL}), "content[1]", "use a part of type 'input_image'"),
        (say({"type": "file", "file": {"file_id": "f"}}), "content[1]", "use a part of type 'input_file'"),
        (say({"type": "document", "source": {}}), "content[1]", "use a part of type 'input_file'"),
        (say({"type": "video_url", "video_url": URL}), "content[1]", "use a part of type 'input_video'"),
        (say({"type": "audio", "data": "", "mimeType": "a/b"}), "content[1]", "use a part of type 'input_audio'"),
        (say({"type": "tool_use", "id": "t"}), "content[1]", "use an item of type 'function_call'"),
        (say({"type": "tool_result", "tool_use_id": "t"}), "content[1]", "use an item of type 'function_call_output'"),
        (say({"type": "thinking", "thinking": "Hm."}), "content[1]", "use an item of type 'reasoning'"),
        (say({"type": "function_call"}), "content[1]", "it is an item of its own, not a content part"),
        (give({"type": "image", "data": "", "mimeType": "image/png"}), "output[0]", "use a part of type 'input_image'"),
        ({"type": "input_text", "text": "Hi"}, "", "it belongs into the 'content' of a message"),
        ({"type": "text", "text": "Hi"}, "", "it belongs into the 'content' of a message"),
        ({"type": "image_url", "image_url": URL}, "", "use a part of type 'input_image'"),
        ({"type": "tool_result", "tool_use_id": "t"}, "", "use an item of type 'function_call_output'"),
    ],
)
@pytest.mark.parametrize("is_forwarded", [True, False])
def test_type_of_another_api_is_refused(item: dict[str, Any], path: str, advice: str, is_forwarded: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_unknown_types(decode(say(), item), is_forwarded=is_forwarded)
    param = f"input[1]{'.' if path else ''}{path}.type"
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_value")
    assert caught.value.message.startswith(f"Invalid value for '{param}': ")
    assert caught.value.message.endswith(f"is not allowed here: {advice}.")


UNKNOWN: list[tuple[list[dict[str, Any]], str]] = [
    ([say({"type": "acme:note", "text": "x"})], "input[0].content[1]"),
    ([say(), {"type": "acme:note"}], "input[1]"),
    ([{"type": "hologram_call"}, say({"type": "acme:a"}, {"type": "acme:b"})], "input[0] and 2 more"),
]


@pytest.mark.parametrize(("items", "path"), UNKNOWN)
def test_unknown_type_is_named_in_a_warning(items: list[dict[str, Any]], path: str) -> None:
    expected = [f"{path}: the type is unknown, so the model gets the JSON as text"]
    assert check_unknown_types(decode(*items), is_forwarded=False) == expected
    assert check_unknown_types(decode(*items), is_forwarded=True) == []


def test_known_types_cause_no_warning() -> None:
    image = {"type": "input_image", "image_url": URL["url"]}
    assert check_unknown_types(decode(say(image), give(image)), is_forwarded=False) == []
