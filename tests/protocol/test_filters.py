"""Filters on attributes: parsing with param paths, and matching."""

from typing import Any

import pytest

from antiphon.errors import InvalidRequest
from antiphon.protocol.filters import MAX_DEPTH, parse_filter

ATTRIBUTES: dict[str, Any] = {"name": "b", "year": 2020, "ratio": 0.5, "open": True}


def compare(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


class CountingText(str):
    """A text that counts the comparisons with it."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingText.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_membership_is_not_compared_with_each_value() -> None:
    condition = parse_filter(compare("in", "name", [str(number) for number in range(1000)]))
    assert condition.matches({"name": CountingText("999")})
    assert not condition.matches({"name": CountingText("other")})
    assert CountingText.comparisons < 10


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        (compare("eq", "name", "b"), True),
        (compare("eq", "year", 2020.0), True),
        (compare("eq", "year", "2020"), False),
        (compare("eq", "open", 1), False),
        (compare("eq", "missing", "b"), False),
        (compare("ne", "name", "a"), True),
        (compare("ne", "year", "2020"), True),
        (compare("ne", "missing", "a"), True),
        (compare("gt", "year", 2019), True),
        (compare("gte", "year", 2020), True),
        (compare("lt", "ratio", 0.5), False),
        (compare("lte", "ratio", 0.5), True),
        (compare("gt", "name", "a"), True),
        (compare("gt", "name", 1), False),
        (compare("lt", "name", 1), False),
        (compare("gt", "open", 0), False),
        (compare("lt", "missing", 1), False),
        (compare("in", "year", [2019, 2020]), True),
        (compare("in", "name", []), False),
        (compare("in", "missing", ["a"]), False),
        (compare("nin", "name", ["a", 1]), True),
        (compare("nin", "name", ["b"]), False),
        (compare("nin", "missing", ["b"]), True),
        ({"type": "and", "filters": [compare("eq", "name", "b"), compare("gt", "year", 2021)]}, False),
        ({"type": "or", "filters": [compare("eq", "name", "b"), compare("gt", "year", 2021)]}, True),
    ],
)
def test_filter_matches_attributes(condition: dict[str, Any], matches: bool) -> None:
    assert parse_filter(condition).matches(ATTRIBUTES) is matches


@pytest.mark.parametrize(
    ("condition", "param", "code"),
    [
        ({}, "filters.type", "missing_required_parameter"),
        ({"type": "like"}, "filters.type", "invalid_value"),
        ({"type": "eq", "value": 1}, "filters.key", "missing_required_parameter"),
        ({"type": "eq", "key": 1, "value": 1}, "filters.key", "invalid_type"),
        ({"type": "eq", "key": "a"}, "filters.value", "missing_required_parameter"),
        (compare("eq", "a", None), "filters.value", "invalid_type"),
        (compare("eq", "a", ["b"]), "filters.value", "invalid_type"),
        (compare("gt", "a", True), "filters.value", "invalid_type"),
        (compare("in", "a", "b"), "filters.value", "invalid_type"),
        (compare("in", "a", [{}]), "filters.value[0]", "invalid_type"),
        ({"type": "eq", "property": "a", "value": 1, "key": "a"}, "filters.property", "unknown_parameter"),
        ({"type": "and"}, "filters.filters", "missing_required_parameter"),
        ({"type": "and", "filters": []}, "filters.filters", "invalid_value"),
        ({"type": "and", "filters": [compare("eq", "a", 1), 5]}, "filters.filters[1]", "invalid_type"),
        ({"type": "or", "filters": [compare("eq", "a", {})]}, "filters.filters[0].value", "invalid_type"),
    ],
)
def test_invalid_filter_is_refused_with_its_path(condition: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_filter(condition)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_deep_and_wide_filters_are_refused() -> None:
    deep: dict[str, Any] = compare("eq", "a", 1)
    for _ in range(MAX_DEPTH + 1):
        deep = {"type": "and", "filters": [deep]}
    wide = {"type": "or", "filters": [compare("eq", "a", 1)] * 300}
    for condition in (deep, wide):
        with pytest.raises(InvalidRequest, match="at most"):
            parse_filter(condition)
