import pytest

from antiphon.errors import AntiphonError, ModelNotFound, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.upstream.retry import RetryPolicy


def make(*, request_retries: int = 4, stream_retries: int = 5) -> RetryPolicy:
    return RetryPolicy(request_retries=request_retries, stream_retries=stream_retries)


def test_waits_double_up_to_a_bound() -> None:
    policy = make(request_retries=100)
    waits = [policy.wait_after(UpstreamError("x")) for _ in range(101)]
    bases = [min(0.2 * 2**number, 30) for number in range(100)]
    assert waits[100] is None
    assert [base * 0.9 <= (wait or 0) <= base * 1.1 for wait, base in zip(waits, bases, strict=False)] == [True] * 100


def test_the_two_kinds_of_failures_are_counted_apart() -> None:
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
def test_only_what_may_pass_is_tried_again(error: AntiphonError, again: bool) -> None:
    assert (make().wait_after(error) is not None) is again
