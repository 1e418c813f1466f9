"""The circuit breaker of an upstream: it pauses requests after several failures in a row.

A request can cause an error of the upstream, so not every failure shows that the upstream is broken:

- A failed connection does not depend on the request. Several of them in a row pause the requests of all projects.
- Another failure counts once for each request of a project. Several of them in a row pause the requests of that
  project.
- If they come from at least two projects, they pause the requests of all projects for a short time.

A success, or an answer that rejects a request, resets the count.
"""

import logging
import math
from collections.abc import Callable, Hashable
from typing import Literal

from antiphon.bounds import remove_oldest
from antiphon.errors import AntiphonError, Unavailable
from antiphon.upstream.network_errors import Unreachable
from antiphon.upstream.retry import is_outage

FAILURE_THRESHOLD = 5
MAX_SHARE = 3
"""Number of failures of one project that count for a pause of all projects: no project can cause it alone."""

FIRST_PAUSE = 10.0
MAX_PAUSE = 60.0
TRIAL_SECONDS = 10.0
"""Time after which another trial is admitted, although the last one has no result: it may wait for a slow model."""

_MAX_PROJECTS = 10_000

BreakerState = Literal["closed", "half_open", "open"]

logger = logging.getLogger(__name__)


class _Circuit:
    """Failures in a row, and the pause that they cause.

    After the pause one call is admitted as a trial. Each failed trial doubles the pause.
    """

    def __init__(self) -> None:
        self._failures: set[Hashable] = set()
        self._is_open = False
        self._pause = FIRST_PAUSE
        self._paused_until = self._trial_until = -math.inf

    def read_state(self, now: float) -> BreakerState:
        """Return `open` during the pause, then `half_open` until a trial succeeds, else `closed`."""
        if not self._is_open:
            return "closed"
        return "open" if now < self._paused_until else "half_open"

    def admit(self, now: float) -> bool:
        """Return True if this call is a trial. Raises `Unavailable` during the pause and during a trial."""
        if not self._is_open:
            return False
        left = self._paused_until - now
        if left > 0 or now < self._trial_until:
            raise _make_error(left)
        self._trial_until = now + TRIAL_SECONDS
        return True

    def end_trial(self) -> None:
        self._trial_until = -math.inf

    def add_failure(self, key: Hashable, now: float, *, is_trial: bool) -> float | None:
        """Count a failure, once for each key. Return the length of the pause that begins with it, if one does."""
        if self._is_open:
            if not is_trial:  # calls that were in progress when the pause began do not extend it
                return None
            self._pause = min(2 * self._pause, MAX_PAUSE)
        else:
            self._failures.add(key)
            if len(self._failures) < FAILURE_THRESHOLD:
                return None
            self._is_open = True
        self._paused_until = now + self._pause
        return self._pause


class CircuitBreaker:
    """The circuit breaker of the backend `name`."""

    def __init__(self, name: str, *, now: Callable[[], float]) -> None:
        self._name = name
        self._now = now
        self._connection_circuit = _Circuit()
        self._project_circuits: dict[str, _Circuit] = {}
        self._recent: dict[str, set[Hashable]] = {}  # failed requests of each project since the last success of any
        self._paused_until = -math.inf  # for all projects, because of failures of several
        self._call_count = 0
        self.has_failures = False  # while it is False, there is nothing to check or to reset

    @property
    def state(self) -> BreakerState:
        """The state for all projects. A pause of single projects is not part of it."""
        now = self._now()
        return "open" if now < self._paused_until else self._connection_circuit.read_state(now)

    @property
    def paused_projects(self) -> int:
        """The number of projects whose requests are paused because of their own failures."""
        now = self._now()
        return sum(circuit.read_state(now) == "open" for circuit in self._project_circuits.values())

    def guard(self, project: str = "") -> "CallGuard":
        """Return a context manager for one call: it raises `Unavailable` during a pause, else counts the outcome."""
        return CallGuard(self, project)

    def admit(self, project: str) -> list[_Circuit]:
        """Return the circuits for which this call is a trial. Raises `Unavailable` during a pause."""
        now = self._now()
        if now < self._paused_until:
            raise _make_error(self._paused_until - now)
        trials: list[_Circuit] = []
        for circuit in (self._connection_circuit, self._project_circuits.get(project)):
            try:
                if circuit is not None and circuit.admit(now):
                    trials.append(circuit)
            except Unavailable:
                for trial in trials:
                    trial.end_trial()
                raise
        return trials

    def count_outcome(
        self, error: BaseException | None, *, project: str, request: bytes | None, trials: list[_Circuit]
    ) -> None:
        """Count a call that succeeded, or failed with this error. `request` is the body of the request."""
        for trial in trials:
            trial.end_trial()
        if error is not None and (not isinstance(error, AntiphonError) or request is None):
            return  # cancelled, or not sent
        if error is None or not is_outage(error):
            self._reset(project)  # an upstream that rejects a request works
            return
        self.has_failures = True
        if isinstance(error, Unreachable):
            self._call_count += 1
            self._add_failure(self._connection_circuit, self._call_count, trials, "requests")
            return
        self._connection_circuit = _Circuit()
        key = hash(request)
        circuit = self._project_circuits.setdefault(project, _Circuit())
        remove_oldest(self._project_circuits, _MAX_PROJECTS)
        self._add_failure(circuit, key, trials, f"requests of the project '{project}'")
        self._add_recent(project, key)

    def _add_failure(self, circuit: _Circuit, key: Hashable, trials: list[_Circuit], paused: str) -> None:
        pause = circuit.add_failure(key, self._now(), is_trial=circuit in trials)
        if pause is not None:
            logger.warning("backend %s: repeated failures; %s are paused for %.0f s.", self._name, paused, pause)

    def _add_recent(self, project: str, key: Hashable) -> None:
        failed = self._recent.setdefault(project, set())
        if len(failed) < MAX_SHARE:
            failed.add(key)
        if sum(map(len, self._recent.values())) >= FAILURE_THRESHOLD:
            self._recent = {}
            self._paused_until = self._now() + FIRST_PAUSE
            logger.warning(
                "backend %s: failures of several projects; requests are paused for %.0f s.", self._name, FIRST_PAUSE
            )

    def _reset(self, project: str) -> None:
        self._connection_circuit = _Circuit()
        self._project_circuits.pop(project, None)
        self._recent = {}
        self.has_failures = bool(self._project_circuits) or self._now() < self._paused_until


class CallGuard:
    """The context manager of `CircuitBreaker.guard`. A generator would cost three times as much.

    `request` is set by the call, to the body that identifies it.
    """

    __slots__ = ("_breaker", "_project", "_trials", "request")

    def __init__(self, breaker: CircuitBreaker, project: str) -> None:
        self._breaker = breaker
        self._project = project
        self._trials: list[_Circuit] = []
        self.request: bytes | None = None

    def __enter__(self) -> "CallGuard":
        if self._breaker.has_failures:
            self._trials = self._breaker.admit(self._project)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None or self._breaker.has_failures:
            self._breaker.count_outcome(error, project=self._project, request=self.request, trials=self._trials)


def _make_error(left: float) -> Unavailable:
    return Unavailable(
        "The upstream failed repeatedly. Requests to it are paused.",
        code="upstream_unavailable",
        retry_after=max(left, 1.0),
    )
