"""The journal: a loaded run has the state of the written one."""

import json
from typing import Any

import pytest

from antiphon.agent.entries import (
    AnswerEntry,
    CallIntentEntry,
    CallPauseEntry,
    CallResultEntry,
    EndEntry,
    Entry,
    FailedAttemptEntry,
    PausedCall,
    ResumeEntry,
    StartEntry,
    Verdict,
)
from antiphon.agent.journal import Journal, load, unpack
from antiphon.agent.outcome import RunError
from antiphon.ledger import Ledger, RunTaken
from antiphon.protocol.response import Usage


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "act", "arguments": {"n": 1}}


ENCRYPTED = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
ANSWER = {"type": "message", "content": [{"type": "output_text", "text": "Done."}]}

ENTRIES: list[Entry] = [
    StartEntry("agent", [{"role": "user", "content": "Go."}, ENCRYPTED], 100.0),
    FailedAttemptEntry(Usage(2, 1, 3)),
    AnswerEntry("resp_1", [call("a"), call("b"), call("c"), call("d")], Usage(3, 2, 5)),
    CallIntentEntry("c"),
    CallIntentEntry("a"),
    CallResultEntry("c", "third"),
    CallResultEntry("a", [{"type": "input_text", "text": "first"}]),
    CallIntentEntry("d"),
    CallPauseEntry("d", [PausedCall("d/x", "pay", "{}")], b"\x00state"),
    EndEntry("needs_approval", 110.0),
    ResumeEntry(170.0, [Verdict("b", False, "no"), Verdict("d/x", True)]),
    CallResultEntry("b", "second", True),
    CallIntentEntry("d"),
    CallResultEntry("d", "fourth", consequence="no_progress"),
    AnswerEntry("", [ANSWER], Usage(1, 1, 2), [], "x", drops_encrypted=True),
    EndEntry("failed", 180.0, RunError("code", "message", "raw")),
]


async def write(journal: Journal, entries: list[Entry]) -> None:
    for entry in entries:
        await journal.write(entry)


def describe(journal: Journal) -> dict[str, Any]:
    return vars(journal.state)


@pytest.mark.parametrize("count", range(1, len(ENTRIES) + 1))
async def test_loaded_journal_has_the_written_state(ledger: Ledger, count: int) -> None:
    journal = Journal("run_1", ledger=ledger)
    await write(journal, ENTRIES[:count])
    assert describe(await load("run_1", ledger)) == describe(journal)
    assert describe(unpack(journal.pack())) == describe(journal)
    assert unpack(journal.pack()).run_id == "run_1"


async def test_state_follows_from_the_entries() -> None:
    journal = Journal("run_1")
    await write(journal, ENTRIES[:10])
    state = journal.state
    assert ENCRYPTED in state.history
    assert [each.call_id for each in state.open_calls] == ["b", "d"]
    assert [state.awaits_verdict(call_id) for call_id in ("a", "b", "d/x", "y")] == [False, True, True, False]
    await write(journal, ENTRIES[10:])
    assert ENCRYPTED not in state.history
    assert (state.turns, state.tool_calls, state.text, state.limit_reached, state.usage) == (
        2,
        3,
        "Done.",
        "no_progress",
        Usage(6, 4, 10),
    )
    # One minute was spent waiting.
    assert state.started_at == 160.0
    outputs = [item for item in state.history if "output" in item]
    assert [(item["call_id"], item["output"]) for item in outputs] == [
        ("a", [{"type": "input_text", "text": "first"}]),
        ("b", "second"),
        ("c", "third"),
        ("d", "fourth"),
    ]


async def test_verdict_applies_to_one_attempt() -> None:
    journal = Journal("run_1")
    await write(journal, [*ENTRIES[:3], ResumeEntry(1.0, [Verdict("a", True)])])
    assert not journal.state.awaits_verdict("a")
    await journal.write(CallIntentEntry("a"))
    assert journal.state.awaits_verdict("a")


async def test_write_fails_after_another_process_resumed_the_run(ledger: Ledger) -> None:
    mine = Journal("run_1", ledger=ledger)
    await write(mine, ENTRIES[:3])
    theirs = await load("run_1", ledger)
    await theirs.write(CallIntentEntry("a"))
    with pytest.raises(RunTaken):
        await mine.write(CallIntentEntry("b"))
    # An entry that was not written does not change the state.
    assert mine.state.started_calls == set()


async def test_ledger_lists_title_and_status_of_a_run(ledger: Ledger) -> None:
    journal = Journal("run_1", ledger=ledger)
    history = [{"role": "user", "content": "Before."}, {"role": "user", "content": "Go. " * 100}]
    await journal.write(StartEntry("agent", history, 1.0))
    statuses = []
    for entry in (EndEntry("cancelled", 2.0), ResumeEntry(3.0), EndEntry("failed", 4.0)):
        (summary,) = await ledger.runs()
        statuses.append(summary.status)
        await journal.write(entry)
    assert statuses == ["running", "cancelled", "running"]
    (summary,) = await ledger.runs()
    assert (summary.status, summary.title) == ("failed", ("Go. " * 100)[:200])


async def test_arguments_object_is_encoded_as_text() -> None:
    journal = Journal("run_1")
    await write(journal, ENTRIES[:3])
    assert json.loads(journal.state.calls[0].arguments) == {"n": 1}


async def test_invalid_entry_is_not_written(ledger: Ledger) -> None:
    journal = Journal("run_1", ledger=ledger)
    await write(journal, ENTRIES[:7])
    for entry in (CallResultEntry("a", "again"), CallIntentEntry("nobody"), CallPauseEntry("a", [])):
        with pytest.raises(ValueError, match="is open"):
            await journal.write(entry)
    assert describe(await load("run_1", ledger)) == describe(journal)
