"""A signal of changes to any number of waiting tasks."""

import asyncio


class ChangeSignal:
    """Wakes all tasks that wait for the next change.

    `next` is an event that is set once, at the next change. Read it before the state that you compare, so that a change
    meanwhile is not missed.
    """

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def notify(self) -> None:
        """Set the event, and replace it for later changes."""
        changed, self.next = self.next, asyncio.Event()
        changed.set()
