"""The code of a call is extracted from its arguments while the model writes them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.tools.hosted.code_interpreter.code_stream import CodeReader, parse_code

CODE = "print('ä\\n')\n# \"quoted\" \\ / 😀\u2028 end"


def read_in_pieces(arguments: str, size: int) -> list[str]:
    reader = CodeReader()
    return [reader.feed(arguments[start : start + size]) for start in range(0, len(arguments), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_code_is_read_from_pieces_of_any_size(size: int, ascii_only: bool) -> None:
    arguments = json.dumps({"code": CODE}, ensure_ascii=ascii_only)
    assert "".join(read_in_pieces(arguments, size)) == CODE


@given(st.text(), st.integers(1, 9), st.booleans())
def test_streamed_code_equals_the_parsed_code(code: str, size: int, ascii_only: bool) -> None:
    arguments = json.dumps({"code": code}, ensure_ascii=ascii_only)
    assert "".join(read_in_pieces(arguments, size)) == parse_code(arguments) == code


def test_each_piece_returns_the_code_that_it_completes() -> None:
    reader = CodeReader()
    pieces = ['{ "co', 'de" : "a', "b\\", "n", "\\ud83d", "\\ude00c", '"}', " "]
    assert [reader.feed(piece) for piece in pieces] == ["", "a", "b", "\n", "", "😀c", "", ""]


def test_surrogates_without_a_partner_are_replaced() -> None:
    reader = CodeReader()
    assert "".join(reader.feed(piece) for piece in ('{"code": "a\\ud83d', "b\\udc00", 'c"}')) == "a\ufffdb\ufffdc"
    assert parse_code('{"code": "a\\ud83db\\udc00c"}') == "a\ufffdb\ufffdc"


def test_text_after_the_code_is_not_read() -> None:
    reader = CodeReader()
    assert reader.feed('{"code": "1", "other": "2"}') == "1"
    assert reader.feed('"3"') == ""


@pytest.mark.parametrize("arguments", ['{"other": "x", "code": "1"}', "print(1)", '["code"]', '{"code": 1}', ""])
def test_code_that_is_not_the_first_member_is_not_streamed(arguments: str) -> None:
    assert CodeReader().feed(arguments) == ""


def test_parsing_finds_code_at_any_position() -> None:
    assert parse_code('{"other": "x", "code": "1"}') == "1"
    assert parse_code('{"code": "a\nb"}') == "a\nb"  # some models do not escape line breaks


@pytest.mark.parametrize(
    "arguments", ["print(1)", '["code"]', '{"code": 1}', '{"code": null}', "", '{"code": "1"', "[" * 9999]
)
def test_arguments_without_code_parse_as_none(arguments: str) -> None:
    assert parse_code(arguments) is None
