"""Invalid JSON of any kind raises one type of error."""

from typing import Any

import msgspec
import pytest

from antiphon.protocol.json_text import read_json, to_text

DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "kind", "read"),
    [("{}", Any, {}), (b"[1]", Any, [1]), ('{"a": 1}', dict[str, int], {"a": 1}), ("[[[[1]]]]", Any, [[[[1]]]])],
)
def test_valid_json_is_decoded(text: str | bytes, kind: Any, read: Any) -> None:
    assert read_json(text, kind) == read


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[" * DEEP, "JSON is nested too deeply"),
        ("[" * DEEP + "]" * DEEP, "JSON is nested too deeply"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "JSON is nested too deeply"),
        (b'"\xff"', "JSON is malformed: invalid start byte"),
        ('"\udcff"', "JSON is malformed: surrogates not allowed"),
    ],
)
def test_invalid_json_raises_decode_error(text: str | bytes, reason: str) -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        read_json(text)
    assert (type(raised.value), str(raised.value)) == (msgspec.DecodeError, reason)


def test_wrong_type_raises_validation_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `object`, got `array`"):
        read_json("[]", dict[str, Any])


def test_text_is_unchanged_and_other_data_is_encoded() -> None:
    assert [to_text(value) for value in ("a", '{"a": 1}', {"a": 1}, None)] == ["a", '{"a": 1}', '{"a":1}', "null"]
