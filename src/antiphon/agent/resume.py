"""Resuming a run: loading its journal, recording verdicts, and the calls that a crash has interrupted."""

import time
from collections.abc import Sequence

from antiphon.agent.entries import ResumeEntry, Verdict
from antiphon.agent.journal import Journal, RunState, load, unpack
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.tools.base import ToolInvocation

INTERRUPTED = "The process was interrupted during this call. Whether it has had an effect is not known."

_FINISHED = ("final", "decision")


async def resume_journal(run: str | bytes, verdicts: Sequence[Verdict], ledger: Ledger | None) -> Journal:
    """Load the journal of a run and record that this process resumes it. A finished run stays as it is.

    `run` is an id in the ledger, or the packed state of an outcome. Raises InvalidRequest for an unknown run, and for a
    verdict on a call that does not wait for one.
    """
    journal = await _find_journal(run, ledger)
    for verdict in verdicts:
        if not journal.state.awaits_verdict(verdict.call_id):
            raise InvalidRequest(f"No call '{verdict.call_id}' waits for approval in this run.", param="approvals")
    if journal.state.ended is None or journal.state.ended.kind not in _FINISHED:
        await journal.write(ResumeEntry(time.time(), list(verdicts)))
    return journal


def is_interrupted(state: RunState, call: ToolInvocation) -> bool:
    """Return True if an earlier process has started this call and not recorded its result.

    `Tool.on_interrupt` decides what happens to it: see `tool_calls.py`.
    """
    return call.call_id in state.started_calls and call.call_id not in state.paused_calls


async def _find_journal(run: str | bytes, ledger: Ledger | None) -> Journal:
    if isinstance(run, bytes):
        journal = unpack(run)
        # With a ledger, its entries count: the packed state only names the run.
        return journal if ledger is None else await load(journal.run_id, ledger)
    if ledger is None:
        raise InvalidRequest("To resume a run by its id, pass its ledger as 'durable'.", param="durable")
    return await load(run, ledger)
