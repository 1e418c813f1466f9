"""Retries, `Retry-After` and the circuit breaker."""

import asyncio

import pytest

from antiphon.errors import (
    AntiphonError,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.upstream.retry import FAILURE_THRESHOLD, CircuitBreaker, RetryPolicy, parse_retry_after


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


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def fail(circuit: CircuitBreaker, error: BaseException) -> None:
    with pytest.raises(type(error)), circuit.guard():
        raise error


def make_open(clock: Clock) -> CircuitBreaker:
    circuit = CircuitBreaker("there", now=clock)
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, UpstreamError("x"))
    return circuit


def is_open(circuit: CircuitBreaker) -> bool:
    try:
        with circuit.guard():
            return False
    except Unavailable:
        return True


@pytest.mark.parametrize("error", [UpstreamError("x"), UpstreamTimeout("x"), Unavailable("x")])
def test_circuit_opens_after_consecutive_failures(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, error)
    assert not is_open(circuit)  # a success resets the count
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    assert is_open(circuit)


@pytest.mark.parametrize("error", [RateLimited("x"), InvalidRequest("x"), UpstreamError("x", code="upstream_refused")])
def test_rejections_do_not_open_the_circuit(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, UpstreamError("x"))
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    fail(circuit, UpstreamError("x"))
    assert not is_open(circuit)


def test_opening_the_circuit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_open(Clock())
    assert caplog.messages == ["backend there: repeated failures; requests are paused for 10 s."]


def test_rejected_call_gets_retry_after() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 7.5
    with pytest.raises(Unavailable) as raised, circuit.guard():
        pass
    assert (raised.value.code, raised.value.retry_after) == ("upstream_unavailable", 2.5)


def test_one_trial_call_is_admitted_after_the_pause() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 10
    with circuit.guard():
        assert is_open(circuit)
    assert not is_open(circuit)


def test_failed_trials_double_the_pause_up_to_a_minute() -> None:
    clock = Clock()
    circuit = make_open(clock)
    pauses = []
    for pause in (10, 20, 40, 60, 60):
        clock.time += pause - 1
        pauses.append(is_open(circuit))
        clock.time += 1
        fail(circuit, UpstreamError("x"))
    assert pauses == [True] * 5


def test_recovery_resets_the_pause() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 10
    fail(circuit, UpstreamError("x"))
    clock.time += 20
    assert not is_open(circuit)
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, UpstreamError("x"))
    clock.time += 10
    assert not is_open(circuit)


def test_cancelled_trial_admits_the_next_call() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 10
    fail(circuit, asyncio.CancelledError())
    assert not is_open(circuit)


def test_calls_in_progress_do_not_extend_the_pause() -> None:
    clock = Clock()
    circuit = CircuitBreaker("there", now=clock)
    guards = [circuit.guard() for _ in range(FAILURE_THRESHOLD + 5)]
    for guard in guards:
        guard.__enter__()
    for guard in guards:
        clock.time += 1
        error = UpstreamError("x")
        assert not guard.__exit__(UpstreamError, error, None)
    clock.time += 5
    assert not is_open(circuit)
