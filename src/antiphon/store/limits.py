"""Limits of a store, limits on background runs, and the order in which runs are claimed.

The limits on runs are shared by all processes that use one store. A claim counts them in its transaction:
`sqlite/runs.py`.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

# The window of `starts_per_minute`, in seconds.
START_WINDOW = 60.0
# A run whose process has died during this number of attempts may be the cause: it is suspect.
SUSPECT_INTERRUPTIONS = 2
# The number of suspect runs that a process works on at once. After one more interruption, a run is worked on alone.
SUSPECT_GROUP = 16
# A lost lease of a live process is no interruption, up to this attempt. The run may be the cause of later ones.
MAX_UNCOUNTED_ATTEMPT = 10


class StoreLimits(NamedTuple):
    """Limits of a store on disk.

    The limits that begin with `max_` are numbers of objects of a project, of parts of an upload, and of files of a
    vector store. They are the defaults of the settings with the same names.
    """

    min_free_bytes: int = 16 * 1024 * 1024
    """Free space below which the store reports a full disk."""
    wal_bytes: int = 64 * 1024 * 1024
    """Size of the write-ahead log beyond which it is truncated."""
    chain_cache_bytes: int = 32 * 1024 * 1024
    """Memory for the decoded responses of chains."""
    connections: int = 8
    """PostgreSQL: number of connections for reading."""
    listen_url: str = ""
    """PostgreSQL: URL of the server, if the URL of the store leads to a connection pooler."""
    max_conversations: int = 1_000_000
    max_prompts: int = 10_000
    max_keys: int = 10_000
    max_files: int = 100_000
    max_uploads: int = 10_000
    max_upload_parts: int = 10_000
    max_vector_stores: int = 100_000
    max_vector_store_files: int = 10_000


DEFAULT_LIMITS = StoreLimits()


class RunLimits(NamedTuple):
    """Limits for all processes together. None is no limit."""

    concurrency: int | None = None
    """The number of runs in progress."""
    concurrency_per_project: int | None = None
    """The number of runs in progress of each project."""
    starts_per_minute: int | None = None
    """The number of runs that begin in any 60 seconds. Only the first attempt at a run is a start."""
    queued: int | None = None
    """The number of runs that wait. More are not accepted."""
    queued_per_project: int | None = None
    """The number of runs of each project that wait."""
    concurrency_by_project: Mapping[str, int] = MappingProxyType({})
    """Other values of `concurrency_per_project` for some projects."""
    queued_by_project: Mapping[str, int] = MappingProxyType({})
    """Other values of `queued_per_project` for some projects."""
    queued_setting: str = "background_queued_per_project"
    """The name of the setting of `queued_per_project`, for errors."""

    @property
    def counts_waiting(self) -> bool:
        return self.queued is not None or self.queued_per_project is not None

    @property
    def counts_active(self) -> bool:
        return (
            self.concurrency is not None
            or self.concurrency_per_project is not None
            or bool(self.concurrency_by_project)
        )

    def select_project(self, project: str) -> "RunLimits":
        """Return the limits with the number of waiting runs of one project."""
        queued = self.queued_by_project.get(project)
        if queued is None:
            return self
        return self._replace(queued_per_project=queued, queued_setting=f"projects.{project}.limits.queued")


class Admission:
    """The number of runs that one claim may still take.

    `active` has the number of runs in progress by project, `starts` the starts of the last minute, and `slots` the
    number of free slots of the claiming process.
    """

    def __init__(self, limits: RunLimits, *, slots: int, active: Mapping[str, int], starts: int) -> None:
        self._per_project = limits.concurrency_per_project
        self._by_project = limits.concurrency_by_project
        self._active = dict(active)
        self.room = slots
        if limits.concurrency is not None:
            self.room = min(slots, limits.concurrency - sum(active.values()))
        self.starts_left = None if limits.starts_per_minute is None else limits.starts_per_minute - starts
        self.full_projects = {project for project in active if self._is_full(project)}

    @property
    def allows_starts(self) -> bool:
        return self.starts_left is None or self.starts_left > 0

    def admit(self, project: str, *, attempt: int) -> bool:
        """Count a run as taken. Return False if it exceeds a limit. `attempt` is the number of earlier attempts."""
        is_start = attempt == 0
        if self.room <= 0 or project in self.full_projects or (is_start and not self.allows_starts):
            return False
        self.room -= 1
        if is_start and self.starts_left is not None:
            self.starts_left -= 1
        self._active[project] = self._active.get(project, 0) + 1
        if self._is_full(project):
            self.full_projects.add(project)
        return True

    def _is_full(self, project: str) -> bool:
        limit = self._by_project.get(project, self._per_project)
        return limit is not None and self._active[project] >= limit


class SuspectFilter:
    """Admits suspect runs up to the size of their group.

    `held` has the interruptions of the suspect runs that the owner works on. A group of one is the only proof that a
    run kills its process. A group of several runs finds it among many in few crashes, and delays the others less.
    """

    def __init__(self, held: Collection[int]) -> None:
        self._size = len(held)
        self._most = max(held, default=0)
        self._is_closed = False

    def admit(self, interruptions: int) -> bool:
        """Count a run as taken. Return False if it has to wait. Later suspect runs then wait behind it."""
        if interruptions < SUSPECT_INTERRUPTIONS:
            return True
        most = max(self._most, interruptions)
        if self._is_closed or self._size >= (SUSPECT_GROUP if most == SUSPECT_INTERRUPTIONS else 1):
            self._is_closed = True
            return False
        self._size, self._most = self._size + 1, most
        return True


class WaitingRun(Protocol):
    """A run that can be claimed. `position` is its order of arrival."""

    @property
    def position(self) -> int: ...

    @property
    def attempt(self) -> int: ...


Run = TypeVar("Run", bound=WaitingRun)


def choose_in_turns(
    waiting: Mapping[str, tuple[int, Iterator[Run]]], admission: Admission, active: Mapping[str, int]
) -> list[Run]:
    """Return the runs to claim. The next run is always one of the project with the fewest runs in progress.

    `waiting` has, for each project, the position of its oldest run and its runs, oldest first. Among projects with
    equally many runs in progress (`active`), the one with the oldest run is first.
    """
    chosen: list[Run] = []
    heap = [(active.get(project, 0), position, project) for project, (position, _) in waiting.items()]
    heapq.heapify(heap)
    following: dict[str, Run] = {}
    while heap and admission.room > 0:
        running, _, project = heapq.heappop(heap)
        if project in admission.full_projects:
            continue
        runs = waiting[project][1]
        run = following.pop(project, None) or next(runs, None)
        if run is None:
            continue
        if admission.admit(project, attempt=run.attempt):
            chosen.append(run)
            running += 1
        if (after := next(runs, None)) is not None:
            following[project] = after
            heapq.heappush(heap, (running, after.position, project))
    return chosen
