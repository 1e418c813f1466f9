"""The number of JSON values in a body."""

import json

import pytest

from antiphon.protocol.body_size import has_more_values


@pytest.mark.parametrize(
    "value",
    [
        [1] * 50,
        [""] * 50,
        [[]] * 50,
        {str(number): number for number in range(50)},
        [{"a": [1, 2, 3]}] * 12,
        [["x,{[" * 100] * 5] * 9,
        ['quoted " and \\ escaped', 'a\\\\"b', "é"] * 16,
    ],
)
def test_values_are_counted_and_text_is_not(value: object) -> None:
    body = json.dumps(value).encode()
    assert not has_more_values(body, 101)
    assert has_more_values(body, 40)


def test_short_body_and_long_text_are_accepted() -> None:
    assert not has_more_values(b"[1,2,3]", 10)
    assert not has_more_values(b'"' + b",[{" * 10_000_000 + b'"', 1000)


def test_text_that_is_no_json_ends_the_count() -> None:
    assert has_more_values(b'""' * 100_000 + b"," * 1001, 1000)
    assert not has_more_values(b'"' + b"," * 5000, 10_000)
