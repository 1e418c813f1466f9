"""Limits of keys and projects: their counts, errors, headers and budgets."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.limits import KeyLimits, ProjectSettings, UsageLimits
from antiphon.config.loading import load
from antiphon.engine.usage import Charge
from antiphon.errors import ConfigError, RateLimited
from antiphon.server.limits.limiter import Limiter, Shared, format_duration
from antiphon.server.limits.sync import add_counts
from antiphon.store.usage import LimitCounts, Spending
from support.live_server import make_settings


class Clock:
    """A clock that stands still until a test sets it. It starts in the middle of a month."""

    time = datetime(2024, 5, 15, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_limiter(clock: Clock, **tables: Any) -> Limiter:
    return Limiter(make_settings(**tables), now=clock, monotonic=clock)


def refuse(limiter: Limiter, project: str = "p", key_id: str = "key_1") -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        limiter.admit(project, key_id)
    return refused.value


def test_server_without_limits_has_no_limiter() -> None:
    assert Limiter.make(make_settings()) is None
    background_only = UsageLimits(queued=1, background=1, stored_bytes=1)
    assert Limiter.make(make_settings(limits=background_only)) is None
    assert Limiter.make(make_settings(projects={"p": ProjectSettings(key_limits=KeyLimits(concurrent=1))}))


def test_requests_of_each_key_are_counted_for_a_minute(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=2))
    limiter.admit("p", "key_1").release()
    clock.time += 20
    limiter.admit("p", "key_1").release()
    error = refuse(limiter)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 40)
    assert error.message == (
        "Rate limit reached for this API key: 2 requests in the last minute (`limits.requests_per_minute`). "
        "Retry in 40 s."
    )
    limiter.admit("p", "key_2")
    clock.time += 40
    limiter.admit("p", "key_1")
    assert limiter.refusals == {"requests_per_minute": 1}


def test_refused_requests_do_not_count(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=1))
    limiter.admit("p", "key_1").release()
    for _ in range(59):
        clock.time += 1
        refuse(limiter)
    clock.time += 1
    limiter.admit("p", "key_1")


def test_tokens_are_charged_when_a_response_ends(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(tokens_per_minute=100))
    for tokens in (60, 39):
        limiter.admit("p", "key_1")
        limiter.charge(Charge("p", "key_1", tokens, 0.0))
    limiter.admit("p", "key_1")
    limiter.charge(Charge("p", "key_1", 500, 0.0))
    error = refuse(limiter)
    assert (error.retry_after, "`limits.tokens_per_minute`" in error.message) == (60, True)
    clock.time += 60
    limiter.admit("p", "key_1")


def test_concurrent_permit_is_released_once(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(concurrent=2))
    first, _ = limiter.admit("p", "key_1"), limiter.admit("p", "key_1")
    assert refuse(limiter).retry_after == 1
    for _ in range(3):
        first.release()
    limiter.admit("p", "key_1")
    refuse(limiter)


def test_project_limit_counts_all_its_keys_together(clock: Clock) -> None:
    limits = UsageLimits(requests_per_minute=3)
    limiter = make_limiter(clock, projects={"p": ProjectSettings(limits=limits)}, limits=UsageLimits(concurrent=9))
    for key_id in ("key_1", "key_2", "key_3"):
        limiter.admit("p", key_id)
    assert refuse(limiter, key_id="key_4").message == (
        "Rate limit reached for this project: 3 requests in the last minute (`projects.p.limits.requests_per_minute`). "
        "Retry in 60 s."
    )
    for _ in range(4):
        limiter.admit("q", "key_5")


def test_request_refused_by_the_project_does_not_count_for_its_key(clock: Clock) -> None:
    project = ProjectSettings(limits=UsageLimits(concurrent=1))
    limiter = make_limiter(clock, projects={"p": project}, limits=UsageLimits(requests_per_minute=2, concurrent=1))
    held = limiter.admit("p", "key_1")
    for _ in range(5):
        refuse(limiter, key_id="key_2")
    held.release()
    for _ in range(2):
        limiter.admit("p", "key_2").release()


def test_key_limits_of_a_project_replace_the_general_ones(clock: Clock) -> None:
    project = ProjectSettings(key_limits=KeyLimits(requests_per_minute=3))
    limiter = make_limiter(clock, projects={"p": project}, limits=UsageLimits(requests_per_minute=1, concurrent=1))
    for _ in range(3):
        limiter.admit("p", "key_1")
    assert "`projects.p.key_limits.requests_per_minute`" in refuse(limiter).message
    limiter.admit("q", "key_2")
    refuse(limiter, "q", "key_2")


def test_headers_describe_the_limit_with_less_left(clock: Clock) -> None:
    project = ProjectSettings(limits=UsageLimits(requests_per_minute=2, tokens_per_minute=50))
    limiter = make_limiter(
        clock, projects={"p": project}, limits=UsageLimits(requests_per_minute=9, tokens_per_minute=40)
    )
    headers = dict(limiter.admit("p", "key_1").headers)
    assert headers == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"40",
        b"x-ratelimit-remaining-tokens": b"40",
        b"x-ratelimit-reset-tokens": b"0s",
    }
    limiter.charge(Charge("p", "key_2", 45, 0.0))
    clock.time += 15
    described = dict(limiter.describe("p", "key_1"))
    assert described == headers | {
        b"x-ratelimit-reset-requests": b"45s",
        b"x-ratelimit-limit-tokens": b"50",
        b"x-ratelimit-remaining-tokens": b"5",
        b"x-ratelimit-reset-tokens": b"45s",
    }
    assert limiter.describe("q", "key_3")[1] == (b"x-ratelimit-remaining-requests", b"9")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (0.2, "1s"), (59, "59s"), (60, "1m0s"), (89.5, "1m30s")])
def test_duration_is_written_as_in_the_headers_of_openai(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts_of_other_processes_reset_in_a_minute(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=9, tokens_per_minute=40))
    limiter.admit("p", "key_1").release()
    clock.time += 15
    limiter.set_shared({limiter.list_changes()[0].subject: Shared(3, 10, 0)})
    assert dict(limiter.describe("p", "key_1")) == {
        b"x-ratelimit-limit-requests": b"9",
        b"x-ratelimit-remaining-requests": b"5",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"40",
        b"x-ratelimit-remaining-tokens": b"30",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }


def test_budget_ends_with_the_month(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(tokens_per_month=100, cost_per_month=2.5))
    limiter.set_spending([Spending("p", "key_1", 90, 0.0), Spending("q", "key_1", 999, 9.9)], {})
    limiter.admit("p", "key_1")
    limiter.charge(Charge("p", "key_1", 10, 0.0))
    error = refuse(limiter)
    assert (error.type, error.code, error.message) == (
        "insufficient_quota",
        "insufficient_quota",
        "The budget of this API key is used up: 100 tokens of 100 this month (`limits.tokens_per_month`).",
    )
    assert error.retry_after == 17 * 86400
    limiter.charge(Charge("r", "key_2", 0, 2.5))
    assert "2.50 USD of 2.5 this" in refuse(limiter, "r", "key_2").message
    clock.time += error.retry_after
    limiter.admit("p", "key_1")
    limiter.admit("r", "key_2")


@pytest.mark.parametrize(
    ("budget", "tokens", "cost", "expected"),
    [
        ({"tokens_per_month": 50_000_000}, 50_000_123, 0.0, "50000123 tokens of 50000000 this month"),
        ({"cost_per_month": 0.002}, 5, 0.0021, "0.0021 USD of 0.002 this month"),
    ],
)
def test_refusal_by_a_budget_has_the_exact_numbers(
    clock: Clock, budget: dict[str, Any], tokens: int, cost: float, expected: str
) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(**budget))
    limiter.charge(Charge("p", "key_1", tokens, cost))
    assert expected in refuse(limiter).message


def test_stored_spending_replaces_own_charges_up_to_the_mark(clock: Clock) -> None:
    limiter = make_limiter(clock, projects={"p": ProjectSettings(limits=UsageLimits(tokens_per_month=100))})
    limiter.charge(Charge("p", "key_1", 30, 0.0))
    marks = limiter.mark_charges()
    limiter.charge(Charge("p", "key_2", 5, 0.0))
    spending = [Spending("p", "key_1", 30, 0.0), Spending("p", "key_9", 64, 0.0), Spending("pp", "", 50, 0.0)]
    limiter.set_spending(spending, marks)
    limiter.admit("p", "key_1")
    limiter.charge(Charge("p", "key_2", 1, 0.0))
    assert "100 tokens of 100" in refuse(limiter).message


def test_counts_of_other_processes_are_added(clock: Clock) -> None:
    limits = UsageLimits(requests_per_minute=10, tokens_per_minute=100, concurrent=3)
    limiter = make_limiter(clock, limits=limits)
    limiter.admit("p", "key_1").release()
    subject = limiter.list_changes()[0].subject
    reports = [LimitCounts(subject, 8, 0, 1, 0.0), LimitCounts(subject, 4, 20, 3, 45.0)]
    shared = add_counts(reports)
    assert shared == {subject: Shared(9, 5, 1)}
    limiter.set_shared(shared)
    assert refuse(limiter).retry_after == 60
    limiter.set_shared({subject: Shared(0, 99.5, 0)})
    limiter.admit("p", "key_1").release()
    limiter.set_shared({subject: Shared(0, 100, 0)})
    assert "tokens_per_minute" in refuse(limiter).message
    limiter.set_shared({subject: Shared(0, 0, 3)})
    assert "concurrent" in refuse(limiter).message
    limiter.set_shared({})
    limiter.admit("p", "key_1")


def test_changes_are_listed_until_all_counts_are_reported_as_zero(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=9))
    permit = limiter.admit("p", "key_1")
    name = "key:p:key_1"
    assert limiter.list_changes() == [LimitCounts(name, 1, 0, 1)]
    permit.release()
    assert limiter.list_changes() == [LimitCounts(name, 1, 0, 0)]
    clock.time += 61
    assert limiter.list_changes() == []


def test_new_settings_keep_the_counts(clock: Clock) -> None:
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=1))
    limiter.admit("p", "key_1")
    refuse(limiter)
    limiter.configure(make_settings(limits=UsageLimits(requests_per_minute=2)))
    limiter.admit("p", "key_1")
    refuse(limiter)


def test_idle_subjects_are_removed_when_there_are_many(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.server.limits.limiter._MAX_SUBJECTS", 3)
    limiter = make_limiter(clock, limits=UsageLimits(requests_per_minute=1))
    held = limiter.admit("p", "key_0")
    for number in range(1, 3):
        limiter.admit("p", f"key_{number}").release()
    clock.time += 61
    limiter.admit("p", "key_9")
    assert sorted(each.subject for each in limiter.list_changes()) == ["key:p:key_0", "key:p:key_9"]
    held.release()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[limits]\nrequest_per_minute = 1", "unknown setting 'request_per_minute'. Did you mean requests_per_minute?"),
        ("[limits]\nconcurrent = 0", "limits.concurrent: Expected `int` >= 1"),
        ("[limits]\nqueued = -1", "limits.queued: Expected `int` >= 0"),
        ('[limits]\ntokens_per_minute = "many"', "limits.tokens_per_minute: Expected `int | null`, got `str`"),
        ("[projects.a.limits]\ncost_per_month = 0", "projects.a.limits.cost_per_month: Expected `float` > 0"),
        ("[projects.a.key_limits]\nqueued = 1", "projects.a.key_limits: unknown setting 'queued'"),
        ("[projects.a.limit]\nconcurrent = 1", "projects.a: unknown setting 'limit'. Did you mean limits?"),
        ("[projects]\na = 1", "projects.a: Expected `object`, got `int`"),
        ("[projects.a]\nlimits = 1", "projects.a.limits: Expected `object`, got `int`"),
        ("[prices]\nm = 1", "prices.m: expected a table, as in { input = 1.0, output = 4.0 }."),
        ("[prices.m]\ninput = 1", "prices.m: Object missing required field `output`"),
        ("[prices.m]\ninput = -1\noutput = 1", "prices.m.input: Expected `float` >= 0"),
        ("[limits]\ncost_per_month = 5", "cost_per_month needs the prices of models"),
    ],
)
def test_wrong_limits_are_refused_with_their_path(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, {}, {})
    assert problem in refused.value.message


def test_limits_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text(
        """
[limits]
requests_per_minute = 60
queued = 0
[projects.team-a.limits]
tokens_per_month = 1000
stored_bytes = 5
[projects.team-a.key_limits]
concurrent = 2
[prices."some/model"]
input = 0.5
output = 2
"""
    )
    settings = load(file, {}, {})
    assert settings.limits == UsageLimits(requests_per_minute=60, queued=0)
    assert settings.projects == {
        "team-a": ProjectSettings(
            limits=UsageLimits(tokens_per_month=1000, stored_bytes=5), key_limits=KeyLimits(concurrent=2)
        )
    }
    assert settings.prices["some/model"].compute_cost(1_000_000, 0, 1_000_000) == 2.5
