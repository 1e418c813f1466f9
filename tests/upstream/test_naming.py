"""Who answers is told if the upstream says that it is another model."""

from typing import Any

import pytest

from antiphon.stream.deltas import Delta, Served, Text
from antiphon.upstream.fields import MAX_NAME_LENGTH, ServedModel

WORDS: list[Delta] = [Text("Hi.")]


def announce(*names: Any) -> Any:
    served_model = ServedModel("router", "auto")
    for name in names:
        served_model.observe(name)
    return served_model.announce(WORDS)


def test_another_name_comes_before_the_first_words() -> None:
    assert announce(None, "acme/model-1") == [Served("auto", "router", "acme/model-1"), *WORDS]


@pytest.mark.parametrize("name", [None, "", "auto", 5, {"id": "x"}, "a\nb", "x" * (MAX_NAME_LENGTH + 1)])
def test_the_same_name_or_what_is_none_says_nothing(name: Any) -> None:
    assert announce(name) == WORDS


def test_the_last_name_counts() -> None:
    assert announce("acme/model-1", "acme/model-2")[0] == Served("auto", "router", "acme/model-2")
