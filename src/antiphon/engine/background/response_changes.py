"""Changes of followed responses, as the processes that share a store report them to each other.

A process that follows a response of another one announces ResponseFollowed. The process that works on the response
then announces EventsAppended after each write. It announces AttemptBegun when it begins to work on a watched response,
so that followers of an earlier attempt announce themselves again. All of these are hints: a follower polls the store,
too.
"""

from weakref import WeakValueDictionary

from antiphon.engine.background.change_signal import ChangeSignal


class ResponseChanges:
    """The changes of one response. `changed` is notified of each of them.

    `last` is the highest number of an event that was announced. `count` is the number of other changes: the log has to
    be read to find them.
    """

    __slots__ = ("__weakref__", "changed", "count", "last")

    def __init__(self) -> None:
        self.changed = ChangeSignal()
        self.count = 0
        self.last = -1

    def report_events(self, last: int) -> None:
        """Report that the log reaches this number."""
        self.last = max(self.last, last)
        self.changed.notify()

    def report(self) -> None:
        """Report a change other than a new event."""
        self.count += 1
        self.changed.notify()


class FollowedResponses:
    """The changes of all responses that this process follows. An entry exists while a follower holds it."""

    def __init__(self) -> None:
        self._changes: WeakValueDictionary[str, ResponseChanges] = WeakValueDictionary()

    def get(self, response_id: str) -> ResponseChanges | None:
        return self._changes.get(response_id)

    def open(self, response_id: str) -> ResponseChanges:
        """Return the changes of a response, for a follower."""
        changes = self._changes.get(response_id)
        if changes is None:
            changes = self._changes[response_id] = ResponseChanges()
        return changes

    def report(self, response_id: str) -> None:
        """Report a change other than a new event, if the response is followed."""
        changes = self._changes.get(response_id)
        if changes is not None:
            changes.report()

    def report_events(self, response_id: str, last: int) -> None:
        """Report that the log of the response reaches this number, if the response is followed."""
        changes = self._changes.get(response_id)
        if changes is not None:
            changes.report_events(last)

    def report_all(self) -> None:
        for changes in list(self._changes.values()):
            changes.report()
