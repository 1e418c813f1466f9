"""Resuming a run: loading its journal, recording verdicts, and the calls that a crash has interrupted."""

import time
from collections.abc import Callable, Sequence

from msgspec import UNSET, structs

from antiphon.agent.entries import Overrides, ResumeEntry, Verdict
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.ownership import Ownership, has_leases, take_ownership
from antiphon.agent.run_state import RunState
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger, find_first_run
from antiphon.tools.base import ToolInvocation

INTERRUPTED = "The process was interrupted during this call. Whether it has had an effect is not known."

FINISHED = ("final", "decision", "blocked")
"""The kinds of outcomes after which a run cannot be resumed."""


async def resume_journal(
    run: str | bytes,
    verdicts: Sequence[Verdict],
    ledger: Ledger | None,
    *,
    agent: str | None = None,
    force: bool = False,
    ownership: Ownership | None = None,
    overrides: Overrides | None = None,
    session_id: str | None = None,
    check: Callable[[RunState], None] = lambda _: None,
) -> Journal:
    """Load the journal of a run and record that this process resumes it. A finished run stays as it is.

    `run` is an id in the ledger, or the packed state of an outcome. `ownership` is set for the run of a subagent, which
    belongs to the owner of the first run; only the first run can be resumed from outside. Raises InvalidRequest for an
    unknown run, for the run of a subagent, and for a verdict on a call that does not wait for one. Unless `force` is
    set, raises RunTaken if a process executes the run, and InvalidRequest if it is the run of an agent with another
    name than `agent`. A run in a session requires the `session_id`. `check` may raise too, before anything is written.
    """
    journal = await _find_journal(run, ledger)
    if agent is not None and journal.state.agent != agent and not force:
        raise InvalidRequest(
            f"The run '{journal.run_id}' is of the agent '{journal.state.agent}', not of '{agent}'. "
            "Set force to resume it.",
            param="run",
            code="other_agent",
        )
    if agent is not None:
        _check_session(journal, session_id)
    if _is_finished(journal.state):
        _check_verdicts(journal.state, verdicts)
        return journal
    if agent is not None and ledger is not None:
        await _refuse_subagent_run(journal.run_id, ledger)
    check(journal.state)
    if ledger is None or not has_leases(ledger):
        await _write_resume(journal, verdicts, None, overrides)
        return journal
    taken = ownership or await take_ownership(ledger, journal.run_id, force=force)
    try:
        # The former owner may have written entries before it lost the run.
        journal = await load(journal.run_id, ledger)
        journal.ownership = taken
        if not _is_finished(journal.state):
            check(journal.state)
            lease = await ledger.find_lease(journal.run_id)
            idle = taken.idle_seconds if ownership is None or lease is None else lease.idle_seconds
            await _write_resume(journal, verdicts, idle, overrides)
    except BaseException:
        if ownership is None:
            await taken.release()
        raise
    return journal


def _check_session(journal: Journal, session_id: str | None) -> None:
    """Raise InvalidRequest unless the run is resumed with its own session."""
    expected = journal.state.session_id
    if session_id == expected:
        return
    if expected is None:
        message = f"The run '{journal.run_id}' has no session: resume it without one."
    else:
        message = f"The run '{journal.run_id}' is part of the session '{expected}': pass it as 'session'."
    raise InvalidRequest(message, param="session", code="other_session")


async def _refuse_subagent_run(run_id: str, ledger: Ledger) -> None:
    """Raise InvalidRequest for the run of a subagent: a process that owns the first run may be executing it."""
    first = find_first_run(run_id)
    if first is not None and await ledger.read(first):
        raise InvalidRequest(
            f"The run '{run_id}' is of a subagent: resume the run '{first}'.", param="run", code="subagent_run"
        )


async def _write_resume(
    journal: Journal, verdicts: Sequence[Verdict], idle_seconds: float | None, overrides: Overrides | None
) -> None:
    _check_verdicts(journal.state, verdicts)
    numbered = [
        structs.replace(verdict, number=journal.entry_count) if verdict.number is UNSET else verdict
        for verdict in verdicts
    ]
    idle = UNSET if idle_seconds is None else idle_seconds
    changed = UNSET if overrides is None or overrides.is_empty else overrides
    await journal.write(ResumeEntry(time.time(), numbered, idle, changed))


def _check_verdicts(state: RunState, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if not state.awaits_verdict(verdict.call_id):
            message = f"No call '{verdict.call_id}' waits for approval in this run. {_describe_waiting(state)}"
            raise InvalidRequest(message, param="approvals")


def _describe_waiting(state: RunState) -> str:
    if state.ended is not None and state.ended.kind in FINISHED:
        return f"It has ended: {state.ended.kind}."
    # Of a subagent, its own calls wait.
    outer = {call_id for call_id, paused in state.paused_calls.items() if paused.calls}
    waiting = ", ".join(f"'{call_id}'" for call_id in state.list_waiting() if call_id not in outer)
    return f"Waiting calls: {waiting or 'none'}."


def _is_finished(state: RunState) -> bool:
    return state.ended is not None and state.ended.kind in FINISHED


def is_interrupted(state: RunState, call: ToolInvocation) -> bool:
    """Return True if an earlier process has started this call and not recorded its result.

    `Tool.on_interrupt` decides what happens to it: see `tool_calls.py`. A subagent that waits for approval was not
    interrupted: none of its calls was running. A pause without calls is that of a subagent that was stopped.
    """
    paused = state.paused_calls.get(call.call_id)
    return call.call_id in state.started_calls and (paused is None or not paused.calls)


async def _find_journal(run: str | bytes, ledger: Ledger | None) -> Journal:
    if isinstance(run, bytes):
        journal = unpack(run)
        if ledger is None and journal.is_stored:
            raise InvalidRequest(
                f"The run '{journal.run_id}' is in a ledger: pass it as 'ledger', so that no call runs twice.",
                param="ledger",
            )
        # With a ledger, its entries count: the packed state only names the run.
        return journal if ledger is None else await load(journal.run_id, ledger)
    if ledger is None:
        raise InvalidRequest("To resume a run by its id, pass its ledger as 'ledger'.", param="ledger")
    return await load(run, ledger)
