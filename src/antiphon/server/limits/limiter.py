"""Rate limits and budgets of API keys and projects.

A request is admitted if all limits of its key and of its project allow it. Requests count when they are admitted, and
tokens when a response ends, by its true usage. Nothing is reserved for a response that is running.

Each process counts by itself, and adds the counts that the other processes reported last (`sync.py`).
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from antiphon.config.limits import KeyLimits
from antiphon.config.settings import Settings
from antiphon.engine.usage import Charge
from antiphon.errors import AntiphonError, QuotaExceeded, RateLimited
from antiphon.server.limits.window import MinuteWindow
from antiphon.store.usage import LimitCounts, Spending, find_month, find_next_month

Headers = list[tuple[bytes, bytes]]


# The end of a running response cannot be foreseen.
_CONCURRENT_RETRY_SECONDS = 1.0
_MINUTE = 60.0
# Subjects without counts are removed when there are more than this number.
_MAX_SUBJECTS = 10_000


class Shared(NamedTuple):
    """The sums of the counts of all other processes for a subject."""

    requests: float = 0
    tokens: float = 0
    concurrent: int = 0


_NO_SHARED = Shared()


class Subject:
    """A key or a project with limits, and its counts.

    `charged_tokens` and `charged_cost` are the sums since the process started, `spent_tokens` and `spent_cost` those of
    the month in all processes.
    """

    __slots__ = (
        "charged_cost",
        "charged_tokens",
        "concurrent",
        "id",
        "is_changed",
        "label",
        "limits",
        "requests",
        "shared",
        "spent_cost",
        "spent_tokens",
        "table",
        "tokens",
    )

    def __init__(self, subject_id: str, label: str, table: str, limits: KeyLimits) -> None:
        self.id = subject_id
        self.label = label
        self.table = table
        self.limits = limits
        self.requests = MinuteWindow()
        self.tokens = MinuteWindow()
        self.concurrent = 0
        self.charged_tokens = 0
        self.charged_cost = 0.0
        self.spent_tokens = 0
        self.spent_cost = 0.0
        self.shared = _NO_SHARED
        self.is_changed = True  # other processes may have counts for it

    def charge(self, tokens: int, cost: float, now: float) -> None:
        self.tokens.add(now, tokens)
        self.charged_tokens += tokens
        self.charged_cost += cost
        self.spent_tokens += tokens
        self.spent_cost += cost
        self.is_changed = True

    def count_requests(self, now: float) -> float:
        return self.requests.advance(now) + self.shared.requests

    def count_tokens(self, now: float) -> float:
        return self.tokens.advance(now) + self.shared.tokens

    @property
    def is_idle(self) -> bool:
        return not self.concurrent and not self.requests.total and not self.tokens.total


class Permit:
    """An admitted request. It counts for the limit `concurrent` until `release`, which may be called twice."""

    __slots__ = ("_subjects", "headers")

    def __init__(self, subjects: tuple[Subject, ...], headers: Headers) -> None:
        self._subjects = subjects
        self.headers = headers

    def release(self) -> None:
        subjects, self._subjects = self._subjects, ()
        for subject in subjects:
            subject.concurrent -= 1
            subject.is_changed = True


class Limiter:
    """Admits requests within the limits of the settings. Belongs to one event loop.

    `refusals` has the number of refused requests by the limit that refused them. `now` and `monotonic` are clocks, for
    tests.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._monotonic = monotonic
        self._subjects: dict[str, Subject] = {}
        self._by_request: dict[tuple[str, str], tuple[Subject, ...]]
        self._shared: dict[str, Shared] = {}
        self._spending: dict[str, tuple[int, float]] = {}
        self._month = find_month(now())
        self.refusals: Counter[str] = Counter()
        self.configure(settings)

    @classmethod
    def make(cls, settings: Settings) -> "Limiter | None":
        """Return the limiter of a server, or None if no key and no project has a limit that it checks."""
        return cls(settings) if any(limits.has_any for limits in _list_limits(settings)) else None

    def configure(self, settings: Settings) -> None:
        """Use the limits of these settings from now on. All counts stay."""
        self._settings = settings
        self._by_request = {}
        self.has_budgets = any(limits.has_budget for limits in _list_limits(settings))

    def admit(self, project: str, key_id: str) -> Permit:
        """Count a request and return its permit. Raises RateLimited."""
        subjects = self._find_subjects(project, key_id)
        now = self._monotonic()
        for subject in subjects:
            self._check(subject, now)
        for subject in subjects:
            subject.requests.add(now, 1)
            subject.concurrent += 1
            subject.is_changed = True
        return Permit(subjects, self._make_headers(subjects, now))

    def describe(self, project: str, key_id: str) -> Headers:
        """Return the headers of a response that does not count as a request."""
        return self._make_headers(self._find_subjects(project, key_id), self._monotonic())

    def charge(self, charge: Charge) -> None:
        """Count the tokens and the cost of a model call."""
        self._check_month()
        now = self._monotonic()
        for subject in self._find_subjects(charge.project, charge.key_id):
            subject.charge(charge.tokens, charge.cost, now)

    # The state of other processes

    def list_changes(self) -> list[LimitCounts]:
        """Return the counts of the subjects that changed since the last call or have counts in the last minute."""
        now = self._monotonic()
        changes = []
        for subject in self._subjects.values():
            requests, tokens = subject.requests.advance(now), subject.tokens.advance(now)
            if subject.is_changed or not subject.is_idle:
                changes.append(LimitCounts(subject.id, requests, tokens, subject.concurrent))
            subject.is_changed = False
        return changes

    def set_shared(self, shared: dict[str, Shared]) -> None:
        """Set the counts of all other processes, by the id of the subject."""
        self._shared = shared
        for subject in self._subjects.values():
            subject.shared = shared.get(subject.id, _NO_SHARED)

    def mark_charges(self) -> dict[str, tuple[int, float]]:
        """Return the charges so far, by the id of the subject, for `set_spending`."""
        return {subject.id: (subject.charged_tokens, subject.charged_cost) for subject in self._subjects.values()}

    def set_spending(self, spending: list[Spending], marks: dict[str, tuple[int, float]]) -> None:
        """Set the totals of the month that the store has. Charges since `marks` are not part of them."""
        self._check_month()
        self._spending = _total_by_subject(spending)
        for subject in self._subjects.values():
            self._apply_spending(subject, *marks.get(subject.id, (0, 0.0)))

    def _apply_spending(self, subject: Subject, charged_tokens: int, charged_cost: float) -> None:
        tokens, cost = self._spending.get(subject.id, (0, 0.0))
        subject.spent_tokens = tokens + subject.charged_tokens - charged_tokens
        subject.spent_cost = cost + subject.charged_cost - charged_cost

    def _check_month(self) -> None:
        """Reset the budgets when a new month has begun."""
        month = find_month(self._now())
        if month != self._month:
            self._month = month
            self._spending = {}
            for subject in self._subjects.values():
                subject.spent_tokens, subject.spent_cost = 0, 0.0

    # The limits

    def _find_subjects(self, project: str, key_id: str) -> tuple[Subject, ...]:
        found = self._by_request.get((project, key_id))
        if found is None:
            if len(self._subjects) >= _MAX_SUBJECTS:
                self._remove_idle()
            if len(self._by_request) >= _MAX_SUBJECTS:
                self._by_request = {}  # projects and keys without limits have entries, but no subjects
            found = self._by_request[project, key_id] = tuple(self._make_subjects(project, key_id))
        return found

    def _make_subjects(self, project: str, key_id: str) -> Iterable[Subject]:
        table = self._settings.projects.get(project)
        key_limits: KeyLimits = self._settings.limits
        setting = "limits"
        if table is not None and table.key_limits is not None:
            key_limits, setting = table.key_limits, f"projects.{project}.key_limits"
        if key_limits.has_any:
            label = "this API key" if key_id else "requests without an API key"
            yield self._get_subject(_name_key(project, key_id), label, setting, key_limits)
        if table is not None and table.limits.has_any:
            setting = f"projects.{project}.limits"
            yield self._get_subject(_name_project(project), "this project", setting, table.limits)

    def _get_subject(self, subject_id: str, label: str, table: str, limits: KeyLimits) -> Subject:
        """Return the subject with these limits. It may exist with the limits of earlier settings."""
        subject = self._subjects.get(subject_id)
        if subject is None:
            subject = self._subjects[subject_id] = Subject(subject_id, label, table, limits)
            subject.shared = self._shared.get(subject_id, _NO_SHARED)
            self._apply_spending(subject, 0, 0.0)
        subject.table, subject.limits = table, limits
        return subject

    def _remove_idle(self) -> None:
        now = self._monotonic()
        for subject in tuple(self._subjects.values()):
            subject.requests.advance(now)
            subject.tokens.advance(now)
            if subject.is_idle:
                del self._subjects[subject.id]
        self._by_request = {
            key: subjects
            for key, subjects in self._by_request.items()
            if all(subject.id in self._subjects for subject in subjects)
        }

    def _check(self, subject: Subject, now: float) -> None:
        limits = subject.limits
        if limits.has_budget:
            self._check_month()
            if limits.tokens_per_month is not None and subject.spent_tokens >= limits.tokens_per_month:
                raise self._refuse_budget(subject, "tokens_per_month", f"{subject.spent_tokens} tokens")
            if limits.cost_per_month is not None and subject.spent_cost >= limits.cost_per_month:
                digits = ".2f" if limits.cost_per_month >= 1 else "g"
                spent = f"{subject.spent_cost:{digits}} {self._settings.run_currency}"
                raise self._refuse_budget(subject, "cost_per_month", spent)
        most = limits.concurrent
        if most is not None and subject.concurrent + subject.shared.concurrent >= most:
            raise self._refuse(subject, "concurrent", "responses in progress", _CONCURRENT_RETRY_SECONDS)
        most = limits.requests_per_minute
        if most is not None and subject.count_requests(now) + 1 > most:
            seconds = _find_wait(subject.requests, now, most - 1, subject.shared.requests)
            raise self._refuse(subject, "requests_per_minute", "requests in the last minute", seconds)
        most = limits.tokens_per_minute
        if most is not None and subject.count_tokens(now) >= most:
            seconds = _find_wait(subject.tokens, now, most - 1, subject.shared.tokens)
            raise self._refuse(subject, "tokens_per_minute", "tokens in the last minute", seconds)

    def _refuse(self, subject: Subject, name: str, unit: str, seconds: float) -> AntiphonError:
        self.refusals[name] += 1
        limit = getattr(subject.limits, name)
        seconds = max(1.0, seconds)
        return RateLimited(
            f"Rate limit reached for {subject.label}: {limit} {unit} (`{subject.table}.{name}`). "
            f"Retry in {math.ceil(seconds)} s.",
            retry_after=seconds,
        )

    def _refuse_budget(self, subject: Subject, name: str, spent: str) -> AntiphonError:
        self.refusals[name] += 1
        limit = getattr(subject.limits, name)
        seconds = find_next_month(self._now()) - self._now()
        return QuotaExceeded(
            f"The budget of {subject.label} is used up: {spent} of {limit} this month (`{subject.table}.{name}`).",
            retry_after=seconds,
        )

    def _make_headers(self, subjects: tuple[Subject, ...], now: float) -> Headers:
        """Return OpenAI's headers for the key or the project that has less left."""
        headers: Headers = []
        requests = [(each.limits.requests_per_minute, each.requests, each.shared.requests) for each in subjects]
        _add_headers(headers, b"requests", requests, now)
        tokens = [(each.limits.tokens_per_minute, each.tokens, each.shared.tokens) for each in subjects]
        _add_headers(headers, b"tokens", tokens, now)
        return headers


def _add_headers(
    headers: Headers, unit: bytes, counts: list[tuple[int | None, MinuteWindow, float]], now: float
) -> None:
    limited = [
        (limit - window.advance(now) - shared, limit, window, shared)
        for limit, window, shared in counts
        if limit is not None
    ]
    if not limited:
        return
    remaining, limit, window, shared = min(limited, key=lambda each: each[0])
    headers += [
        (b"x-ratelimit-limit-" + unit, b"%d" % limit),
        (b"x-ratelimit-remaining-" + unit, b"%d" % max(0, math.floor(remaining))),
        (b"x-ratelimit-reset-" + unit, format_duration(_find_wait(window, now, 0, shared)).encode()),
    ]


def format_duration(seconds: float) -> str:
    """Return a duration in the format of OpenAI's headers, such as `1m0s`."""
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= _MINUTE else f"{whole}s"


def _find_wait(window: MinuteWindow, now: float, most: float, shared: float) -> float:
    """Return the time until the counts are at most `most`. Counts of other processes are expected to last a minute."""
    return _MINUTE if shared > most else window.find_wait(now, most - shared)


def _list_limits(settings: Settings) -> Iterable[KeyLimits]:
    yield settings.limits
    for project in settings.projects.values():
        yield project.limits
        if project.key_limits is not None:
            yield project.key_limits


def _total_by_subject(spending: Iterable[Spending]) -> dict[str, tuple[int, float]]:
    """Return the tokens and the cost of each key and each project, by the id of the subject."""
    totals: dict[str, tuple[int, float]] = {}
    for project, key_id, tokens, cost in spending:
        for subject_id in (_name_project(project), _name_key(project, key_id)):
            before = totals.get(subject_id, (0, 0.0))
            totals[subject_id] = before[0] + tokens, before[1] + cost
    return totals


def _name_project(project: str) -> str:
    return f"project:{project}"


def _name_key(project: str, key_id: str) -> str:
    return f"key:{project}:{key_id}"
