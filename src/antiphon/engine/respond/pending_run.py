"""A run that is made while the upstream works on its request, so that its stream begins without delay."""

from collections.abc import Callable

from antiphon.engine.respond.run import Run
from antiphon.engine.serve.routing import Serving

OnPending = Callable[[Run], Callable[[], bool] | None]
"""Called with a run that may still be refused. Returns a function that sends the first events of the run.

That function is called when the upstream accepts the request. It returns True if the events were sent. If it returns
None, or False, they are sent when the run is returned.
"""


class PendingRun:
    """A run that may still be refused. It leaves no trace before the upstream has accepted its request.

    `make_run` makes the run. `on_added` and `on_begun` are called with it when it begins.
    """

    __slots__ = ("_is_begun", "_make_run", "_on_begun", "_on_pending", "_run", "_send", "_serving", "on_added")

    def __init__(
        self, on_pending: OnPending, *, make_run: Callable[[Serving], Run], on_begun: Callable[[Run], None]
    ) -> None:
        self._on_pending = on_pending
        self._make_run = make_run
        self._on_begun = on_begun
        self.on_added: Callable[[Run], None] | None = None
        self._serving: Serving | None = None
        self._run: Run | None = None
        self._send: Callable[[], bool] | None = None
        self._is_begun = False

    def prepare(self, serving: Serving) -> Callable[[], bool] | None:
        """Make the run. Return a function that begins it."""
        self._serving = serving
        self._run = run = self._make_run(serving)
        self._send = self._on_pending(run)
        return None if self._send is None else self._send_first_events

    def _send_first_events(self) -> bool:
        assert self._run is not None
        assert self._send is not None
        if not self._send():
            return False
        self._begin(self._run)
        return True

    def _begin(self, run: Run) -> None:
        self._is_begun = True
        if self.on_added is not None:
            self.on_added(run)
        self._on_begun(run)

    def finish(self, serving: Serving) -> Run:
        """Return the run with the deltas of `serving`."""
        run, pending = self._run, self._serving
        if self._is_begun and run is not None:
            run.deltas = serving.deltas
            return run
        is_same = pending is not None and (
            pending.candidate is serving.candidate and list(pending.warnings) == list(serving.warnings)
        )
        if is_same and run is not None:
            run.deltas = serving.deltas
        else:
            run = self._make_run(serving)
        self._begin(run)
        return run

    async def close(self) -> None:
        """Close a run that has begun, because nothing will read it."""
        if self._run is not None and self._is_begun:
            await self._run.close()
