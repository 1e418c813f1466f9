"""The arguments of past calls."""

import pytest

from antiphon.upstream.fields import normalize_arguments


@pytest.mark.parametrize("arguments", ["{}", '{ "b":1.0,"a" : 1e2, "c":"\\u0041" }'])
def test_an_object_stays_as_it_was_written(arguments: str) -> None:
    assert normalize_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ("null", '{"arguments":"null"}'),
        ("[1]", '{"arguments":"[1]"}'),
        ('{"a":', r'{"arguments":"{\"a\":"}'),
        ('{"a":NaN}', r'{"arguments":"{\"a\":NaN}"}'),
        ("{}{}", '{"arguments":"{}{}"}'),
    ],
)
def test_what_is_no_object_becomes_text_in_one(arguments: str, written: str) -> None:
    assert normalize_arguments(arguments) == written


def test_an_object_without_end_is_text() -> None:
    assert normalize_arguments('{"a":' * 100_000).startswith('{"arguments":"')
