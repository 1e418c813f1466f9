"""The end of a stream: a reader that closes it, drops it, or fails."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from antiphon import Agent, RunStream, SqliteLedger, TextDelta, list_runs
from antiphon.testing.scripted import ScriptedTransport


class Boom(Exception):
    """An exception of the program that reads a stream."""


def make_agent() -> Agent:
    return Agent(model="scripted", transport=ScriptedTransport({"default": "One two three four."}))


async def read_first_text(stream: RunStream[Any]) -> None:
    async for event in stream:
        if isinstance(event, TextDelta):
            break


async def read_statuses(ledger: SqliteLedger) -> list[str]:
    return [summary.status for summary in await list_runs(ledger)]


def test_exception_of_the_reader_ends_the_run_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = SqliteLedger(tmp_path / "runs.db")

    async def fail() -> None:
        stream = make_agent().run_stream("Go.", ledger=ledger)
        async for event in stream:
            if isinstance(event, TextDelta):
                # The traceback has a reference to the variable, and so to the stream, until the event loop is closed.
                raise Boom

    with pytest.raises(Boom):
        asyncio.run(fail())
    assert [record.getMessage() for record in caplog.records] == []
    assert asyncio.run(read_statuses(ledger)) == ["cancelled"]


async def test_run_is_cancelled_at_the_end_of_its_block(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "runs.db")
    agent = make_agent()
    async with agent.run_stream("Go.", ledger=ledger) as stream:
        await read_first_text(stream)
        assert await read_statuses(ledger) == ["running"]
    assert await read_statuses(ledger) == ["cancelled"]
    with pytest.raises(RuntimeError, match="The run has no outcome"):
        stream.outcome  # noqa: B018
    await agent.close()


async def test_streams_that_have_ended_leave_no_task() -> None:
    agent = make_agent()
    await agent.run("Go.")  # starts the tasks of the engine
    before = asyncio.all_tasks()
    ended = agent.run_stream("Go.")
    async for _ in ended:
        pass
    closed = agent.run_stream("Go.")
    async with aclosing(closed):
        await read_first_text(closed)
    failed = agent.resume_stream("run_1")
    with pytest.raises(Exception, match="ledger"):
        await read_first_text(failed)
    del failed
    for _ in range(2):  # the watcher is cancelled in one turn of the event loop, and ends in the next
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
    assert ended.outcome.text == "One two three four."
    await agent.close()
