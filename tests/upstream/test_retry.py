"""Retries and `Retry-After`."""

import pytest

from antiphon.errors import (
    AntiphonError,
    ModelNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.upstream.retry import RetryPolicy, parse_retry_after


def make(*, request_retries: int = 4, stream_retries: int = 5) -> RetryPolicy:
    return RetryPolicy(request_retries=request_retries, stream_retries=stream_retries)


def test_retry_waits_double_up_to_a_limit() -> None:
    policy = make(request_retries=100)
    waits = [policy.wait_after(UpstreamError("x")) for _ in range(101)]
    bases = [min(0.2 * 2**number, 30) for number in range(100)]
    assert waits[100] is None
    assert [base * 0.9 <= (wait or 0) <= base * 1.1 for wait, base in zip(waits, bases, strict=False)] == [True] * 100


def test_request_and_stream_retries_are_separate() -> None:
    policy = make(request_retries=1, stream_retries=1)
    waits = [policy.wait_after(UpstreamError("x"))]
    policy.answered = True
    waits += [policy.wait_after(UpstreamError("x")), policy.wait_after(UpstreamError("x"))]
    assert [wait is None for wait in waits] == [False, False, True]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UpstreamError("x"), True),
        (UpstreamTimeout("x"), True),
        (Unavailable("x", code="upstream_overloaded"), True),
        (RateLimited("x"), True),
        (RateLimited("x", retry_after=60), True),
        (RateLimited("x", retry_after=60.1), False),
        (RateLimited("x", code="insufficient_quota"), False),
        (UpstreamError("x", code="upstream_authentication"), False),
        (UpstreamError("x", code="upstream_refused"), False),
        (ModelNotFound("x"), False),
    ],
)
def test_only_transient_errors_are_retried(error: AntiphonError, again: bool) -> None:
    assert (make().wait_after(error) is not None) is again


NOW = 1_445_412_450.0  # Wed, 21 Oct 2015 07:27:30 GMT


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "3", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "3", "retry-after-ms": "nan"}, 3),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT"}, 0),
        ({"retry-after": "Wed, 99 Oct 2015 07:28:00 GMT"}, None),
    ],
)
def test_retry_after_headers_are_parsed(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, now=NOW) == seconds
