import asyncio

import pytest

from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, Unavailable, UpstreamError, UpstreamTimeout
from antiphon.upstream.retry import FAILURE_THRESHOLD, CircuitBreaker


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
def test_it_opens_after_so_many_failures_in_a_row(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, error)
    assert not is_open(circuit)  # which was a success, so the count begins anew
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    assert is_open(circuit)


@pytest.mark.parametrize("error", [RateLimited("x"), InvalidRequest("x"), UpstreamError("x", code="upstream_refused")])
def test_a_server_that_refuses_works(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, UpstreamError("x"))
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    fail(circuit, UpstreamError("x"))
    assert not is_open(circuit)


def test_the_log_says_when_it_opens(caplog: pytest.LogCaptureFixture) -> None:
    make_open(Clock())
    assert caplog.messages == ["backend there: repeated failures; requests are paused for 10 s."]


def test_who_is_kept_out_is_told_for_how_long() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 7.5
    with pytest.raises(Unavailable) as raised, circuit.guard():
        pass
    assert (raised.value.code, raised.value.retry_after) == ("upstream_unavailable", 2.5)


def test_after_the_pause_one_call_is_let_through_to_try() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 10
    with circuit.guard():
        assert is_open(circuit)
    assert not is_open(circuit)


def test_each_trial_that_fails_doubles_the_pause_up_to_a_minute() -> None:
    clock = Clock()
    circuit = make_open(clock)
    pauses = []
    for pause in (10, 20, 40, 60, 60):
        clock.time += pause - 1
        pauses.append(is_open(circuit))
        clock.time += 1
        fail(circuit, UpstreamError("x"))
    assert pauses == [True] * 5


def test_after_a_recovery_the_pause_is_short_again() -> None:
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


def test_a_trial_that_is_cancelled_lets_the_next_one_try() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 10
    fail(circuit, asyncio.CancelledError())
    assert not is_open(circuit)


def test_calls_that_were_under_way_do_not_lengthen_the_pause() -> None:
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
