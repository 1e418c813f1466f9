"""One hosted call of a response: its intent and outcome in the journal, and the end of a call that was interrupted."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from antiphon.engine.respond.run import Postponed
from antiphon.engine.serve.hosted.answer import AnswerCall
from antiphon.engine.serve.hosted.journal import HostedJournal, IntentStep, OutcomeStep
from antiphon.errors import AntiphonError
from antiphon.store.base import LeaseLost
from antiphon.stream import deltas
from antiphon.stream.delta_codec import encode_deltas
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import HostedCall

if TYPE_CHECKING:
    from antiphon.engine.telemetry import EngineTelemetry

logger = logging.getLogger(__name__)

UNEXPECTED = "The tool failed unexpectedly. See the server's log."
UNKNOWN_OUTCOME = (
    "The server was interrupted while this call was running. Its outcome is unknown, and it was not repeated."
)


class CallRunner:
    """Runs the calls of one response. `replayed` are the deltas that an earlier attempt has shown.

    `early` are those of the steps that are sent again from the journal.
    """

    def __init__(
        self, journal: HostedJournal, replayed: Sequence[Delta], telemetry: "EngineTelemetry | None" = None
    ) -> None:
        self.early: Sequence[Delta] = ()
        self._journal = journal
        self._replayed = replayed
        self._telemetry = telemetry

    async def run(self, each: AnswerCall, call: HostedCall) -> AsyncGenerator[Sequence[Delta], None]:
        """Run a call. Its outcome is stored before the end of its last item is sent."""
        record = each.record
        opening: Sequence[Delta] = ()
        if each.is_interrupted and not each.is_repeatable:
            run = self._end_interrupted(each, call)
        else:
            opening = () if each.has_written else call.write(record.arguments)
            if not each.is_interrupted:
                await self._journal.append(
                    IntentStep(key=record.key, is_repeatable=call.is_repeatable, parent=record.parent)
                )
            run = _execute(call, record.arguments)
            if self._telemetry is not None:
                run = self._telemetry.trace_hosted_call(run, record)
        emitted = list(opening)
        if opening:
            yield opening
        held: Sequence[Delta] = ()
        has_closed = False
        async with aclosing(run) as batches:
            async for batch in batches:
                emitted += batch
                if held:
                    yield held
                held = batch if _closes(batch) else ()
                has_closed |= bool(held)
                if not held:
                    yield batch
        if not has_closed:
            logger.error("the hosted tool of '%s' did not close its item", record.name)
            held = call.fail(UNEXPECTED)
            emitted += held
        outcome = OutcomeStep(
            key=record.key, deltas=encode_deltas(emitted), needs_client=call.needs_client, parent=record.parent
        )
        await self._journal.append(outcome)
        if held:
            yield held

    async def _end_interrupted(self, each: AnswerCall, call: HostedCall) -> AsyncGenerator[Sequence[Delta], None]:
        """End a call whose outcome is unknown, after the events of its item that readers have seen."""
        ending = [*(() if each.has_written else call.write(each.record.arguments)), *call.fail(UNKNOWN_OUTCOME)]
        opened = [delta for delta in ending if isinstance(delta, deltas.OpenItem)]
        if len(opened) > 1 or any(isinstance(delta, deltas.WholeItem) for delta in ending):
            yield ending  # items without events that depend on the run
            return
        shown = self._list_shown_events(each.record.key)
        own = [delta for delta in ending if isinstance(delta, deltas.ItemPassthrough)]
        rest = [delta for delta in ending if not isinstance(delta, deltas.OpenItem | deltas.ItemPassthrough)]
        yield [*opened, *(shown or own), *rest]

    def _list_shown_events(self, key: str) -> list[Delta]:
        """Return the events of the open item that were sent by an earlier attempt and are not in the journal."""
        start = None
        for index, delta in enumerate(self._replayed):
            if isinstance(delta, deltas.OpenItem):
                start = index
            elif isinstance(delta, deltas.CloseItem):
                start = None
        if start is None:
            return []
        events = [delta.event for delta in self._replayed[start:] if isinstance(delta, deltas.Passthrough)]
        known = sum(1 for delta in self.early if isinstance(delta, deltas.ItemPassthrough) and delta.key == key)
        return [deltas.ItemPassthrough(event, key) for event in events[known:]]


async def _execute(call: HostedCall, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
    """Run a call. An error of the tool ends the call as failed. An error of the journal ends the attempt."""
    try:
        async with aclosing(call.run(arguments)) as batches:
            async for batch in batches:
                yield batch
    except (LeaseLost, Postponed):
        raise
    except AntiphonError as error:
        yield call.fail(error.message)
    except Exception:
        logger.exception("a hosted tool failed")
        yield call.fail(UNEXPECTED)


def _closes(batch: Sequence[Delta]) -> bool:
    return any(isinstance(delta, deltas.CloseItem | deltas.WholeItem) for delta in batch)
