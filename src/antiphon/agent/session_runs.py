"""Runs within a session: hold the session, and store the items of the run when it ends."""

import asyncio
import logging
from typing import Any

from msgspec import structs

from antiphon.agent.entries import SessionSaveEntry
from antiphon.agent.journal import Journal
from antiphon.agent.outcome import Outcome
from antiphon.agent.ownership import Ownership, take_ownership
from antiphon.agent.run_stream import OutcomeHolder
from antiphon.errors import AntiphonError
from antiphon.ledger import RunTaken
from antiphon.protocol.json_text import JsonObject
from antiphon.session import Session, SessionBusy, SessionFailed

logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.01
_MAX_DELAY_SECONDS = 0.25

# Runs with these outcomes are expected to be resumed. A session that only appends gets their items after that.
_UNFINISHED = ("needs_approval", "cancelled", "deadline", "failed")


class SessionRun:
    """A session that one run holds."""

    def __init__(self, session: Session, ownership: Ownership) -> None:
        self._session = session
        self._ownership = ownership
        self._is_saved = False

    @classmethod
    async def open(cls, session: Session, cancel: asyncio.Event | None) -> "SessionRun | None":
        """Wait until no other run holds the session, and hold it. Return None if the run is cancelled meanwhile.

        Raises SessionBusy.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + session.wait_seconds
        delay = _FIRST_DELAY_SECONDS
        while True:
            try:
                return cls(session, await take_ownership(session, session.session_id))
            except RunTaken:
                if cancel is not None and cancel.is_set():
                    return None
                if loop.time() >= ends_at:
                    raise SessionBusy(session.session_id, session.wait_seconds) from None
            await asyncio.sleep(min(delay, max(0.0, ends_at - loop.time())))
            delay = min(delay * 2, _MAX_DELAY_SECONDS)

    async def save(self, holder: OutcomeHolder, outcome: Outcome[Any]) -> Outcome[Any]:
        """Store the items of a run that has ended, and return its outcome. Raises SessionFailed."""
        self._is_saved = True
        assert holder.journal is not None, "the run has begun"
        try:
            await self._save(holder.journal, holder.close_history(), outcome.kind)
        except Exception as error:
            reason = error.message if isinstance(error, AntiphonError) else f"{type(error).__name__}: {error}"
            raise SessionFailed(self._session.session_id, reason, outcome) from error
        if self._session.appends_only and outcome.state is not None:
            return structs.replace(outcome, state=holder.journal.pack())
        return outcome

    async def close(self, holder: OutcomeHolder) -> None:
        """Store the items of a run that was left before its end, and release the session."""
        try:
            if holder.journal is not None and not self._is_saved:
                await self._save(holder.journal, holder.close_history(), "cancelled")
        except Exception:
            # The run can be resumed, and stores its items then.
            logger.warning("cannot store the items of the run in its session", exc_info=True)
        finally:
            await self._ownership.release()

    async def _save(self, journal: Journal, history: list[JsonObject], kind: str) -> None:
        state, session = journal.state, self._session
        if not state.turns:
            # The model has not answered, so the task can be given again.
            return
        items = history[state.earlier_count :]
        if not session.appends_only:
            await session.save_run(journal.run_id, items)
        elif kind not in _UNFINISHED and len(items) > state.saved_count:
            await session.save_run(journal.run_id, items[state.saved_count :])
            await journal.write(SessionSaveEntry(len(items)))
