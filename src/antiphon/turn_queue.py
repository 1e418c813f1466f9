"""The queue in front of a model: bounded, fair between projects, and foreground before background.

A model runs a number of turns at once, its slots. Other turns wait. A freed slot goes to the project that has used the
model least since it began to wait, and within a project to the turn that has waited longest. Background turns get a
slot when no foreground turn waits, and one of every `BACKGROUND_SHARE` slots otherwise.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from antiphon.errors import AntiphonError, RateLimited, Unavailable

OVERLOADED = "server_overloaded"
"""The error code of a request that is refused because the whole server is busy."""

# While turns of both kinds wait, one slot in this number goes to a background turn.
BACKGROUND_SHARE = 8
# Weight of the newest turn in the mean duration of turns.
_SMOOTHING = 0.2


class QueueLimits(NamedTuple):
    """Limits of the queue of each model, for foreground turns.

    `queued` and `queued_per_project`: the number of turns that wait. `seconds`: the longest wait.
    """

    queued: int = 512
    queued_per_project: int = 128
    seconds: float = 300.0


class Throughput:
    """The rate at which a number of parallel turns end, by the duration of the last ones."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._mean_seconds = 0.0
        self._changed_at = -math.inf

    def begin(self) -> float:
        """Return the time at which a turn begins, for `end`."""
        now = self._changed_at = self._now()
        return now

    def end(self, began_at: float) -> None:
        now = self._changed_at = self._now()
        weight = _SMOOTHING if self._mean_seconds else 1.0
        self._mean_seconds += (now - began_at - self._mean_seconds) * weight

    def estimate_seconds(self, turns: int, *, running: int, longest: float) -> float:
        """Return the time in which `turns` end while `running` ones run: at least a second, at most `longest`.

        If no turn has begun or ended for longer than usual, that time counts as the usual one. If none runs here, other
        processes work on the queue.
        """
        idle_seconds = self._now() - self._changed_at if running else 0.0
        interval = max(self._mean_seconds / max(1, running), idle_seconds)
        return max(1.0, min(turns * interval, longest))


class Slot:
    """The right to run one turn. `release` may be called more than once."""

    __slots__ = ("_queue", "began_at")

    def __init__(self, queue: "TurnQueue", began_at: float) -> None:
        self._queue: TurnQueue | None = queue
        self.began_at = began_at

    def release(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.end_turn(self)


class TurnQueue:
    """Hands out the slots of one model. Belongs to one event loop.

    Background turns are neither refused nor timed out: their number is limited where they are accepted. A queue for the
    preparation of turns is `ahead_of` the queue that they enter next. It has the limits of that queue, and counts the
    turns of both.
    """

    def __init__(
        self, slots: int, *, ahead_of: "TurnQueue | None" = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = QueueLimits()
        self._ahead_of = ahead_of
        self._slots = slots
        self._free = slots
        self._throughput = Throughput(now)
        self._foreground = _WaitingTurns()
        self._background = _WaitingTurns()
        self._foreground_streak = 0
        self._closed = ""

    @property
    def limits(self) -> QueueLimits:
        return self._limits if self._ahead_of is None else self._ahead_of.limits

    @limits.setter
    def limits(self, limits: QueueLimits) -> None:
        self._limits = limits

    @property
    def waiting(self) -> int:
        """The number of waiting turns of both kinds."""
        return self._foreground.size + self._background.size

    @property
    def running(self) -> int:
        return self._slots - self._free

    async def acquire(self, project: str, *, background: bool = False, weight: int = 1) -> Slot:
        """Wait for a slot. `weight` is the amount of work, in any unit that all turns of the queue share.

        Raises at once if too many turns wait: RateLimited if they are the project's own, else Unavailable. Raises
        Unavailable if the wait is too long.
        """
        if self._closed:
            raise Unavailable(self._closed)
        if self._free:  # no turn waits while a slot is free
            self._free -= 1
            return Slot(self, self._throughput.begin())
        if background:
            return await self._wait(self._background, _WaitingTurn(project, weight))
        self.check_room(project)
        turn = _WaitingTurn(project, weight)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.limits.seconds, self._expire, turn)
        try:
            return await self._wait(self._foreground, turn)
        finally:
            timer.cancel()

    def close(self, reason: str) -> None:
        """Refuse all turns that wait, and those that follow, with this message."""
        self._closed = reason
        for waiting in (self._foreground, self._background):
            while waiting.size:
                turn = waiting.pop()
                if not turn.granted.done():
                    turn.granted.set_exception(Unavailable(reason))

    def check_room(self, project: str) -> None:
        """Raise the error that `acquire` raises for a foreground turn if too many wait."""
        if self._free:
            return
        own, size, projects = self._count_waiting(project)
        limits = self.limits
        if own >= limits.queued_per_project:
            # All projects have the same share of the model.
            seconds = self.estimate_seconds(min(own * projects, size))
            raise refuse_project(f"requests of this project wait for the model: {own}", "queued_per_project", seconds)
        if size >= limits.queued:
            seconds = self.estimate_seconds(size)
            raise refuse_all(f"requests wait for the model: {size}", "queued", seconds)

    def end_turn(self, slot: Slot) -> None:
        """Take back a slot. `Slot.release` calls this once."""
        self._throughput.end(slot.began_at)
        self._pass_on()

    def estimate_seconds(self, turns: int) -> float:
        """Return the time in which this number of turns ends."""
        seconds = self._throughput.estimate_seconds(turns, running=self._slots, longest=self.limits.seconds)
        return seconds if self._ahead_of is None else max(seconds, self._ahead_of.estimate_seconds(turns))

    async def _wait(self, waiting: "_WaitingTurns", turn: "_WaitingTurn") -> Slot:
        waiting.add(turn)
        try:
            return await turn.granted
        except BaseException:
            if turn.granted.cancelled() or turn.granted.exception() is not None:
                waiting.discard(turn)
            else:  # cancelled after a slot was granted
                turn.granted.result().release()
            raise

    def _pass_on(self) -> None:
        """Give a freed slot to the next waiting turn, if there is one."""
        while (waiting := self._choose_kind()).size:
            turn = waiting.pop()
            if not turn.granted.done():  # it may be cancelled, and its task has not run yet
                turn.granted.set_result(Slot(self, self._throughput.begin()))
                return
        self._free += 1

    def _choose_kind(self) -> "_WaitingTurns":
        if not self._background.size or not self._foreground.size:
            self._foreground_streak = 0
            return self._foreground if self._foreground.size else self._background
        if self._foreground_streak >= BACKGROUND_SHARE - 1:
            self._foreground_streak = 0
            return self._background
        self._foreground_streak += 1
        return self._foreground

    def _count_waiting(self, project: str) -> tuple[int, int, int]:
        """Return the number of waiting foreground turns of the project and of all, and the number of projects."""
        waiting = self._foreground
        own, size, projects = waiting.count(project), waiting.size, waiting.projects
        if self._ahead_of is not None:
            then = self._ahead_of._count_waiting(project)
            return own + then[0], size + then[1], max(projects, then[2])
        return own, size, projects

    def _expire(self, turn: "_WaitingTurn") -> None:
        if not turn.granted.done():
            self._foreground.discard(turn)
            reason = f"the request waited {self.limits.seconds:g} seconds for the model"
            turn.granted.set_exception(
                refuse_all(reason, "queue_seconds", self.estimate_seconds(self._foreground.size))
            )


def refuse_project(reason: str, setting: str, seconds: float) -> AntiphonError:
    """Return the error for a project that has used up its share of a queue. `seconds` is the time until a retry."""
    return RateLimited(_explain(reason, setting, seconds), retry_after=seconds)


def refuse_all(reason: str, setting: str, seconds: float) -> AntiphonError:
    """Return the error for a queue that is full. `seconds` is the time until a retry."""
    return Unavailable(_explain(reason, setting, seconds), code=OVERLOADED, retry_after=seconds)


def _explain(reason: str, setting: str, seconds: float) -> str:
    return f"The server is busy: {reason}, the maximum of the setting `{setting}`. Retry in {math.ceil(seconds)} s."


class _WaitingTurn:
    __slots__ = ("granted", "project", "weight")

    def __init__(self, project: str, weight: int) -> None:
        self.granted: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.project = project
        self.weight = weight


class _ProjectLine:
    """The waiting turns of one project, oldest first.

    `due` is the amount of work of each project after which the first of them is served, and `number` is for ties.
    """

    __slots__ = ("due", "number", "turns")

    def __init__(self, first: _WaitingTurn, due: int, number: int) -> None:
        self.turns = deque((first,))
        self.due = due
        self.number = number


class _WaitingTurns:
    """Waiting turns of one kind, with self-clocked fair queueing between projects.

    The clock is the work that each waiting project has had. The next turn is the one that ends first on this clock. A
    project that begins to wait starts at the current time, so it neither gains nor loses by an earlier pause.
    """

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[str, _ProjectLine] = {}
        self._clock = 0
        self._next_number = 0

    @property
    def projects(self) -> int:
        return len(self._lines)

    def count(self, project: str) -> int:
        line = self._lines.get(project)
        return 0 if line is None else len(line.turns)

    def add(self, turn: _WaitingTurn) -> None:
        self.size += 1
        line = self._lines.get(turn.project)
        if line is not None:
            line.turns.append(turn)
        else:
            self._lines[turn.project] = _ProjectLine(turn, self._clock + turn.weight, self._take_number())

    def pop(self) -> _WaitingTurn:
        """Remove and return the next turn. There must be one."""
        line = min(self._lines.values(), key=lambda each: (each.due, each.number))
        self._clock = line.due
        turn = line.turns.popleft()
        line.number = self._take_number()
        self._close_gap(line, turn, self._clock)
        return turn

    def discard(self, turn: _WaitingTurn) -> None:
        """Remove a turn, if it still waits."""
        line = self._lines.get(turn.project)
        if line is None or turn not in line.turns:
            return
        was_first = line.turns[0] is turn
        line.turns.remove(turn)
        if was_first:
            self._close_gap(line, turn, line.due - turn.weight)
        else:
            self.size -= 1

    def _close_gap(self, line: _ProjectLine, removed: _WaitingTurn, start: int) -> None:
        """Compute when the new first turn of a line is due, or remove the line."""
        self.size -= 1
        if line.turns:
            line.due = start + line.turns[0].weight
        else:
            del self._lines[removed.project]

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number
