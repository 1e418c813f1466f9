"""The circuit breaker: which failures pause requests, and whose."""

import asyncio
import itertools

import pytest

from antiphon.errors import (
    AntiphonError,
    InvalidRequest,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.stream.limits import AnswerLimits
from antiphon.upstream.circuit_breaker import FAILURE_THRESHOLD, FIRST_PAUSE, TRIAL_SECONDS, CircuitBreaker
from antiphon.upstream.network_errors import ConnectTimedOut, Unreachable

_numbers = itertools.count()


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def fail(circuit: CircuitBreaker, error: BaseException, *, project: str = "a", request: bytes | None = None) -> None:
    """Fail a call. Each one has another request unless one is given."""
    with pytest.raises(type(error)), circuit.guard(project) as guard:
        guard.request = b"%d" % next(_numbers) if request is None else request
        raise error


def make_open(clock: Clock, error: AntiphonError | None = None) -> CircuitBreaker:
    circuit = CircuitBreaker("there", now=clock)
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error or UpstreamError("x"))
    return circuit


def is_open(circuit: CircuitBreaker, project: str = "a") -> bool:
    try:
        with circuit.guard(project) as guard:
            guard.request = b""
            return False
    except Unavailable:
        return True


def is_paused(circuit: CircuitBreaker, project: str) -> bool:
    """Return the same as `is_open`, without the success that ends the row of failures."""
    try:
        with circuit.guard(project):
            raise asyncio.CancelledError
    except Unavailable:
        return True
    except asyncio.CancelledError:
        return False


@pytest.mark.parametrize(
    "error", [UpstreamError("x"), UpstreamTimeout("x"), Unavailable("x"), Unreachable("x"), ConnectTimedOut("x")]
)
def test_circuit_opens_after_consecutive_failures(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, error)
    assert not is_open(circuit)  # a success resets the count
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    assert is_open(circuit)


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("x"),
        InvalidRequest("x"),
        UpstreamError("x", code="upstream_refused"),
        AnswerLimits().make_error("max_answer_bytes"),
    ],
)
def test_rejections_do_not_open_the_circuit(error: AntiphonError) -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD - 1):
        fail(circuit, UpstreamError("x"))
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, error)
    fail(circuit, UpstreamError("x"))
    assert not is_open(circuit)


def test_requests_that_were_not_sent_do_not_reset_the_count() -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD):
        with pytest.raises(InvalidRequest), circuit.guard("a"):
            raise InvalidRequest("x")
        fail(circuit, Unreachable("x"))
    assert is_paused(circuit, "a")


def test_repeated_request_counts_once() -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(3 * FAILURE_THRESHOLD):
        fail(circuit, UpstreamError("x"), request=b"the same")
    assert not is_paused(circuit, "a")


def test_failed_requests_of_a_project_pause_only_that_project() -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, UpstreamError("x"), project="a")
    assert (is_paused(circuit, "a"), is_paused(circuit, "b")) == (True, False)
    fail(circuit, UpstreamError("x"), project="b")  # a single failure of another project
    assert not is_paused(circuit, "b")


def test_failed_connections_pause_all_projects() -> None:
    circuit = make_open(Clock(), Unreachable("x"))
    assert (is_paused(circuit, "a"), is_paused(circuit, "b")) == (True, True)


def test_failures_of_several_projects_pause_all_projects_for_a_short_time() -> None:
    clock = Clock()
    circuit = CircuitBreaker("there", now=clock)
    for project in ("a", "b", "a", "b", "a"):
        assert not is_paused(circuit, "c")
        fail(circuit, UpstreamError("x"), project=project)
    assert [is_paused(circuit, each) for each in ("a", "b", "c")] == [True] * 3
    clock.time += 10
    assert [is_paused(circuit, each) for each in ("a", "b", "c")] == [False] * 3


def test_success_of_any_project_ends_the_row_of_several() -> None:
    circuit = CircuitBreaker("there", now=Clock())
    for project in ("a", "b", "a", "b"):
        fail(circuit, UpstreamError("x"), project=project)
    assert not is_open(circuit, "c")
    fail(circuit, UpstreamError("x"), project="a")
    assert not is_paused(circuit, "c")


def test_opening_the_circuit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_open(Clock(), Unreachable("x"))
    make_open(Clock())
    assert caplog.messages == [
        "backend there: repeated failures; requests are paused for 10 s.",
        "backend there: repeated failures; requests of the project 'a' are paused for 10 s.",
    ]


def test_rejected_call_gets_retry_after() -> None:
    clock = Clock()
    circuit = make_open(clock)
    clock.time += 7.5
    with pytest.raises(Unavailable) as raised, circuit.guard("a"):
        pass
    assert (raised.value.code, raised.value.retry_after) == ("upstream_unavailable", 2.5)


@pytest.mark.parametrize("error", [UpstreamError("x"), Unreachable("x")])
def test_one_trial_call_is_admitted_after_the_pause(error: AntiphonError) -> None:
    clock = Clock()
    circuit = make_open(clock, error)
    clock.time += 10
    with circuit.guard("a") as guard:
        guard.request = b""
        assert is_open(circuit)
    assert not is_open(circuit)


@pytest.mark.parametrize("error", [UpstreamError("x"), Unreachable("x")])
def test_failed_trials_double_the_pause_up_to_a_minute(error: AntiphonError) -> None:
    clock = Clock()
    circuit = make_open(clock, error)
    pauses = []
    for pause in (10, 20, 40, 60, 60):
        clock.time += pause - 1
        pauses.append(is_open(circuit))
        clock.time += 1
        fail(circuit, error)
    assert pauses == [True] * 5


def test_trial_that_gets_an_error_answer_closes_the_connection_circuit() -> None:
    clock = Clock()
    circuit = make_open(clock, Unreachable("x"))
    clock.time += 10
    fail(circuit, UpstreamError("x"), project="a")
    assert (is_paused(circuit, "a"), is_paused(circuit, "b")) == (False, False)


def test_slow_trial_does_not_block_others_for_long() -> None:
    clock = Clock()
    circuit = make_open(clock, Unreachable("x"))
    clock.time += 10
    with circuit.guard("a") as slow:
        slow.request = b""
        assert is_paused(circuit, "b")
        clock.time += TRIAL_SECONDS
        assert not is_paused(circuit, "b")


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
    guards = [circuit.guard("a") for _ in range(FAILURE_THRESHOLD + 5)]
    for number, guard in enumerate(guards):
        guard.__enter__()
        guard.request = b"%d" % number
    for guard in guards:
        clock.time += 1
        error = UpstreamError("x")
        assert not guard.__exit__(UpstreamError, error, None)
    clock.time += 5
    assert not is_open(circuit)


def test_state_follows_the_pause_of_all_projects() -> None:
    clock = Clock()
    circuit = CircuitBreaker("there", now=clock)
    states = [circuit.state]
    for _ in range(FAILURE_THRESHOLD):
        fail(circuit, Unreachable("x"))
    states.append(circuit.state)
    clock.time += FIRST_PAUSE
    states.append(circuit.state)
    assert not is_open(circuit)
    assert [*states, circuit.state] == ["closed", "open", "half_open", "closed"]


def test_pause_of_one_project_is_counted_and_leaves_the_state_closed() -> None:
    clock = Clock()
    circuit = make_open(clock)
    during = circuit.state, circuit.paused_projects
    clock.time += FIRST_PAUSE
    assert (during, circuit.state, circuit.paused_projects) == (("closed", 1), "closed", 0)
