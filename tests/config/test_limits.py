"""Warnings about limits and prices that do not have the effect that the settings suggest."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.config.loading import describe_doubtful_limits, load

HOME = {"HOME": "/home/ada"}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def find_warnings(text: str, **overrides: Any) -> list[str]:
    path = Path("settings.toml")
    path.write_text(text)
    return list(describe_doubtful_limits(load(path, HOME, overrides)))


_LIMITS = """
    [limits]
    concurrent = 8
    stored_bytes = 1000
    [projects.a.limits]
    tokens_per_month = 1000
    [projects.b.key_limits]
    requests_per_minute = 60
    """


def describe_reset(store: str) -> str:
    return (
        f"projects.a.limits.tokens_per_month: {store} loses the usage when it stops, so that a budget begins again at "
        "every start. Store data in SQLite or PostgreSQL."
    )


def test_limits_of_a_stateless_server_with_workers_are_a_warning() -> None:
    warnings = find_warnings(_LIMITS, stateless=True, workers=4)
    multiplied = (
        "limits.concurrent, projects.a.limits.tokens_per_month, projects.b.key_limits.requests_per_minute: each of the "
        "4 workers of a stateless server counts for itself, so that together they admit up to 4 times as much. Divide "
        "the limits by 4, use one worker, or store data in SQLite or PostgreSQL."
    )
    assert warnings == [multiplied, describe_reset("a stateless server")]


def test_budget_in_the_memory_store_is_a_warning() -> None:
    assert find_warnings(_LIMITS, store="memory:") == [describe_reset("the memory store")]


@pytest.mark.parametrize("text", ["workers = 4\nstateless = true", f"workers = 4\n{_LIMITS}", "store = 'memory:'"])
def test_limits_whose_counts_are_stored_are_no_warning(text: str) -> None:
    assert find_warnings(text) == []


def test_price_of_a_model_whose_name_is_an_alias_of_a_priced_model_is_no_warning() -> None:
    prices = "gpt-5 = { input = 1.0, output = 2.0 }\nprod = { input = 2.0, output = 3.0 }"
    assert find_warnings(f"[models]\ngpt-5 = 'azure/prod'\n[prices]\n{prices}") == []


def test_price_that_applies_to_no_model_is_a_warning() -> None:
    models = """
        [models]
        fast = ["a/big", "b"]
        smart = ["a/big", "b/large"]
        "gpt-*" = "a"
        """
    price = "{ input = 1.0, output = 2.0 }"
    names = ("big", "fast", "smart", "gpt-*", "gpt-5", "*")
    lines = "\n".join(f'"{name}" = {price}' for name in names)
    alias, pattern = find_warnings(f"{models}\n[prices]\n{lines}")
    assert alias == (
        "prices: 'smart' is an alias, and a price needs the name of the model on its backend: big, large. The price "
        "does not apply to the alias."
    )
    assert pattern == "prices: 'gpt-*': patterns are not supported. Use the name of one model, or '*' for all others."
