"""Sessions: a chat over several runs and processes, with one run at a time."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon import (
    Agent,
    AntiphonError,
    ConfigError,
    Handoff,
    InvalidRequest,
    Limits,
    MemorySession,
    Session,
    SessionBusy,
    SessionFailed,
    SqliteLedger,
    SqliteSession,
    TurnFinished,
    drop_tool_calls,
    last_turns,
    tool,
)
from antiphon.agent.conversation_session import ConversationSession
from antiphon.agent.tool_calls import CANCELLED, NOT_APPROVED_YET
from antiphon.engine.engine import Engine
from antiphon.engine.sealing import Sealer
from antiphon.errors import Unavailable
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import JsonObject
from antiphon.store.memory.store import MemoryStore
from support.scripted_model import HOLD, ScriptedModel, SharedServer, call, look_up

LOOK = call("look_up", {"city": "Bern"})


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def texts(items: Sequence[JsonObject]) -> list[str]:
    """Return the texts of messages, and the types of other items."""
    return [_text(item) for item in items]


def _text(item: JsonObject) -> str:
    content = item.get("content")
    if not content:
        return str(item["type"])
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def run_program(code: str) -> int:
    """Run code in another process and return its exit status."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    return await process.wait()


@pytest.fixture(params=["memory", "sqlite", "postgres", "server", "engine"])
async def session(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: SharedServer
) -> AsyncIterator[Session]:
    engine = None
    opened: Session
    if request.param == "memory":
        opened = MemorySession()
    elif request.param == "sqlite":
        opened = SqliteSession(tmp_path / "chats.db", "chat_1")
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        from antiphon.store.postgres.session import PostgresSession

        opened = PostgresSession(url, "chat_1")
    elif request.param == "server":
        opened = await ConversationSession.create(base_url=f"{shared_server.server.url}/v1")
    else:
        engine = Engine(backends={}, store=MemoryStore(), sealer=Sealer([bytes(32)]))
        await engine.start()
        opened = await ConversationSession.create(engine=engine)
    yield opened
    await opened.close()
    if engine is not None:
        await engine.close()


# Runs one after the other


async def test_second_run_reads_the_items_of_the_first(in_process: ScriptedModel, session: Session) -> None:
    in_process.set_answers([LOOK], "Mild.", "As I said.")
    agent = in_process.agent(tools=[look_up])
    first = await agent.run("How is it?", session=session)
    second = await agent.run("What?", session=session)
    assert (first.text, second.text) == ("Mild.", "As I said.")
    sent = texts(in_process.sent[2]["input"])
    assert sent == ["How is it?", "function_call", "function_call_output", "Mild.", "What?"]
    assert texts(await session.list_items()) == [*sent, "As I said."]
    assert texts(second.history) == [*sent, "As I said."]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("Hello.", "items: expected a list of items, got str."),
        ({"role": "user", "content": "Hello."}, "items: expected a list of items, got dict."),
        ([user("Hello."), "Bye."], "items[1]: expected an item as a dictionary, got str."),
        (None, "items: expected a list of items, got NoneType."),
    ],
)
async def test_value_that_is_no_list_of_items_is_not_added(session: Session, items: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await session.add_items(items)
    assert raised.value.message == message
    assert await session.list_items() == []


async def test_items_of_any_iterable_are_added(session: Session) -> None:
    await session.add_items(cast(Any, {"a": user("Hello.")}.values()))
    await session.add_items(cast(Any, (user(text) for text in ("How are you?", "Bye."))))
    assert texts(await session.list_items()) == ["Hello.", "How are you?", "Bye."]


def test_trim_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trim: expected a function such as last_turns\(20\), got int\."):
        MemorySession(trim=cast(Any, 20))


async def test_items_are_listed_added_popped_and_cleared(session: Session) -> None:
    assert await session.pop_item() is None
    await session.add_items([user(f"message {number}") for number in range(25)])
    assert texts(await session.list_items()) == [f"message {number}" for number in range(25)]
    assert texts(await session.list_items(limit=2)) == ["message 23", "message 24"]
    popped = await session.pop_item()
    assert popped is not None
    assert texts([popped]) == ["message 24"]
    assert texts(await session.list_items(limit=1)) == ["message 23"]
    await session.clear()
    assert await session.list_items() == []


async def test_session_continues_in_another_process(in_process: ScriptedModel, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    code = f"""
import asyncio
from antiphon import SqliteSession

async def main():
    session = SqliteSession({str(path)!r}, "chat_1")
    await session.add_items([{{"role": "user", "content": "My name is Ada."}}])
    await session.close()

asyncio.run(main())
"""
    assert await run_program(code) == 0
    in_process.set_answers("Ada.")
    session = SqliteSession(path, "chat_1")
    await in_process.agent().run("Who am I?", session=session)
    assert texts(in_process.sent[0]["input"]) == ["My name is Ada.", "Who am I?"]
    other = SqliteSession(path, "chat_2")
    assert await other.list_items() == []
    await session.close()
    await other.close()


async def test_ledger_and_session_can_share_a_file(in_process: ScriptedModel, tmp_path: Path) -> None:
    session, ledger = SqliteSession(tmp_path / "data.db", "chat_1"), SqliteLedger(tmp_path / "data.db")
    in_process.set_answers("Hello.")
    await in_process.agent().run("Hi!", session=session, ledger=ledger, run_id="run_1")
    assert texts(await session.list_items()) == ["Hi!", "Hello."]
    assert [run.run_id for run in await ledger.runs()] == ["run_1"]
    await session.close()
    await ledger.close()


# Concurrent runs


async def test_runs_at_once_take_turns(in_process: ScriptedModel, session: Session) -> None:
    in_process.set_answers("Answer 1.", "Answer 2.", "Answer 3.")
    agent = in_process.agent()
    await asyncio.gather(*(agent.run(f"Question {number}.", session=session) for number in range(3)))
    stored = texts(await session.list_items())
    assert stored[1::2] == ["Answer 1.", "Answer 2.", "Answer 3."]
    assert sorted(stored[::2]) == ["Question 0.", "Question 1.", "Question 2."]
    assert [len(request["input"]) for request in in_process.sent] == [1, 3, 5]


async def test_run_of_another_object_waits_for_the_session(in_process: ScriptedModel, tmp_path: Path) -> None:
    in_process.set_answers([HOLD, {"text": "First."}], "Second.")
    first, second = (SqliteSession(tmp_path / "chats.db", "chat_1") for _ in range(2))
    running = asyncio.ensure_future(in_process.agent().run("One.", session=first))
    await in_process.until_held()
    waiting = asyncio.ensure_future(in_process.agent().run("Two.", session=second))
    assert len(in_process.sent) == 1
    in_process.release()
    await running
    await waiting
    assert texts(in_process.sent[1]["input"]) == ["One.", "First.", "Two."]
    await first.close()
    await second.close()


async def test_run_cancelled_while_it_waits_for_the_session_has_an_outcome(in_process: ScriptedModel) -> None:
    in_process.set_answers([HOLD, {"text": "First."}])
    session, cancel = MemorySession("chat_1"), asyncio.Event()
    running = asyncio.ensure_future(in_process.agent().run("One.", session=session))
    await in_process.until_held()
    waiting = asyncio.ensure_future(in_process.agent().run("Two.", session=session, cancel=cancel))
    cancel.set()
    cancelled = await waiting
    assert (cancelled.kind, cancelled.turns, len(in_process.sent)) == ("cancelled", 0, 1)
    in_process.release()
    assert (await running).text == "First."
    assert texts(await session.list_items()) == ["One.", "First."]


async def test_session_that_is_not_released_in_time_is_busy(in_process: ScriptedModel) -> None:
    in_process.set_answers([HOLD, {"text": "First."}])
    session = MemorySession("chat_1", wait_seconds=0.01)
    running = asyncio.ensure_future(in_process.agent().run("One.", session=session))
    await in_process.until_held()
    with pytest.raises(SessionBusy, match="The session 'chat_1' is in use by another run") as busy:
        await in_process.agent().run("Two.", session=session)
    assert (busy.value.code, busy.value.status, busy.value.param) == ("session_busy", 409, "session")
    in_process.release()
    await running
    assert texts(await session.list_items()) == ["One.", "First."]


async def test_session_of_a_dead_process_is_free(in_process: ScriptedModel, tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from antiphon import SqliteSession
from antiphon.agent.session_runs import SessionRun

async def main():
    await SessionRun.open(SqliteSession({str(tmp_path / "chats.db")!r}, "chat_1"), None)
    os._exit(9)

asyncio.run(main())
"""
    assert await run_program(code) == 9
    session = SqliteSession(tmp_path / "chats.db", "chat_1", wait_seconds=0)
    in_process.set_answers("Hello.")
    assert (await in_process.agent().run("Hi!", session=session)).kind == "final"
    await session.close()


# Runs that do not end with an answer


async def test_failed_run_without_an_answer_leaves_the_session_unchanged(
    in_process: ScriptedModel, session: Session
) -> None:
    in_process.set_answers([{"raise": {"status": 400, "message": "no"}}], "Hello.")
    agent = in_process.agent()
    assert (await agent.run("Hi!", session=session)).kind == "failed"
    assert await session.list_items() == []
    assert (await agent.run("Hi!", session=session)).kind == "final"
    assert texts(await session.list_items()) == ["Hi!", "Hello."]


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


PAY = call("pay", {"amount": 5})


@pytest.mark.parametrize("stored", [True, False], ids=["ledger", "state"])
async def test_paused_run_is_stored_whole_when_it_is_resumed(
    in_process: ScriptedModel, session: Session, stored: bool, tmp_path: Path
) -> None:
    ledger = SqliteLedger(tmp_path / "runs.db") if stored else None
    in_process.set_answers([LOOK], [PAY], "Meanwhile.", "Paid.")
    agent = in_process.agent(tools=[look_up, pay])
    paused = await agent.run("Pay.", session=session, ledger=ledger)
    assert paused.kind == "needs_approval"
    pending = [item["output"] for item in await session.list_items() if "output" in item][1:]
    assert pending == ([] if session.appends_only else [f'{{"error":"{NOT_APPROVED_YET}"}}'])
    await agent.run("Hello?", session=session)
    run = paused.run_id if stored else paused.state
    assert run is not None
    outcome = await agent.resume(run, approvals={"call_1": True}, session=session, ledger=ledger)
    assert outcome.text == "Paid."
    calls = ["function_call", "function_call_output"]
    own, other = ["Pay.", *calls, *calls, "Paid."], ["Hello?", "Meanwhile."]
    assert texts(await session.list_items()) == ([*other, *own] if session.appends_only else [*own, *other])
    # A finished run can be read again without storing it again.
    if ledger is not None:
        await agent.resume(run, session=session, ledger=ledger)
        assert len(await session.list_items()) == 8
        await ledger.close()


async def test_run_resumed_with_a_higher_limit_is_stored_once(in_process: ScriptedModel, session: Session) -> None:
    in_process.set_answers([LOOK], [call("look_up", {"city": "Thun"}, "call_2")], "Mild.")
    agent = in_process.agent(tools=[look_up])
    ended = await agent.run("Go.", session=session, limits=Limits(turns=1, wrap_up=False))
    assert (ended.kind, len(await session.list_items())) == ("max_turns", 3)
    assert ended.state is not None
    await agent.resume(ended.state, session=session, limits=Limits(turns=9))
    calls = ["function_call", "function_call_output"]
    assert texts(await session.list_items()) == ["Go.", *calls, *calls, "Mild."]


async def test_cancelled_run_leaves_a_valid_session(in_process: ScriptedModel) -> None:
    started = asyncio.Event()

    @tool
    async def hang() -> str:
        """Wait for ever."""
        started.set()
        await asyncio.Event().wait()
        return ""

    in_process.set_answers([call("hang")], "Hello.")
    session, agent = MemorySession(), in_process.agent(tools=[hang])
    running = asyncio.ensure_future(agent.run("Wait.", session=session))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    outputs = [item["output"] for item in await session.list_items() if "output" in item]
    assert outputs == [f'{{"error":"{CANCELLED}"}}']
    await agent.run("Hi!", session=session)
    assert texts(in_process.sent[1]["input"]) == ["Wait.", "function_call", "function_call_output", "Hi!"]


async def test_handed_over_run_is_stored_whole(in_process: ScriptedModel, session: Session) -> None:
    in_process.set_answers([LOOK], [call("transfer_to_clerk", {}, "call_2")], "Served.", "Again.")
    clerk = in_process.agent(name="clerk")
    triage = in_process.agent(tools=[look_up], handoffs=[Handoff(clerk, input_filter=drop_tool_calls)])
    await session.add_items([user("Before.")])
    await triage.run("Go.", session=session)
    calls = ["function_call", "function_call_output"]
    assert texts(in_process.sent[2]["input"]) == ["Before.", "Go."]
    stored = texts(await session.list_items())
    assert stored == ["Before.", "Go.", *calls, *calls, "Served."]
    await triage.run("More.", session=session)
    assert texts(in_process.sent[3]["input"]) == [*stored, "More."]


async def test_subagent_has_no_session(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("ask", {"input": "Inner."}, "outer")], "Inner answer.", "Outer answer.")
    expert = in_process.agent(name="expert")
    session = MemorySession()
    await in_process.agent(tools=[expert.as_tool("ask", "Ask.")]).run("Go.", session=session)
    assert texts(in_process.sent[1]["input"]) == ["Inner."]
    assert texts(await session.list_items()) == ["Go.", "function_call", "function_call_output", "Outer answer."]


class FullSession(MemorySession):
    async def save_run(self, run_id: str, items: Sequence[JsonObject]) -> None:
        raise Unavailable("The disk is full.")


async def test_run_whose_items_cannot_be_stored_raises_with_its_outcome(
    in_process: ScriptedModel, caplog: pytest.LogCaptureFixture
) -> None:
    in_process.set_answers("Hello.")
    session = FullSession("chat_1")
    with pytest.raises(SessionFailed, match="The disk is full") as failed:
        await in_process.agent().run("Hi!", session=session)
    assert failed.value.outcome.text == "Hello."
    assert (failed.value.code, failed.value.session_id) == ("session_failed", "chat_1")
    stream = in_process.agent().run_stream("Hi!", session=session)
    async for event in stream:
        if isinstance(event, TurnFinished):
            break
    with caplog.at_level(logging.WARNING):
        await stream.aclose()
    assert "cannot store the items of the run in its session" in caplog.text


# Trimming


async def test_trim_function_selects_the_items_of_the_next_run(in_process: ScriptedModel, tmp_path: Path) -> None:
    in_process.set_answers("Hello.")
    session = SqliteSession(tmp_path / "chats.db", "chat_1", trim=last_turns(2))
    rules = {"role": "developer", "content": "Be brief."}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    await session.add_items([rules, user("1"), user("2"), output, user("3")])
    await in_process.agent().run("4", session=session)
    sent = in_process.sent[0]["input"]
    assert [item.get("content") for item in sent] == ["Be brief.", "2", sent[2]["content"], "3", "4"]
    assert len(await session.list_items()) == 7
    await session.close()


@pytest.mark.parametrize("is_async", [True, False])
async def test_trim_function_can_be_a_coroutine(in_process: ScriptedModel, is_async: bool) -> None:
    async def drop_later(items: list[JsonObject]) -> list[JsonObject]:
        return drop(items)

    def drop(items: list[JsonObject]) -> list[JsonObject]:
        return items[-1:]

    session = MemorySession(trim=drop_later if is_async else drop)
    await session.add_items([user("1"), user("2")])
    in_process.set_answers("Hello.")
    await in_process.agent().run("3", session=session)
    assert texts(in_process.sent[0]["input"]) == ["2", "3"]


async def test_trim_function_that_returns_no_items_is_refused(in_process: ScriptedModel) -> None:
    session = MemorySession(trim=lambda items: "none")  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidRequest, match="must return a list of items"):
        await in_process.agent().run("Hi!", session=session)


# Rejected arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"session": "chats.db"}, ConfigError, r"session: expected a session such as MemorySession\(\), got str."),
        ({"session": MemorySession(), "history": [user("Hi!")]}, InvalidRequest, "either a session or a history"),
    ],
)
def test_invalid_session_arguments_are_refused(
    options: dict[str, Any], error: type[AntiphonError], message: str
) -> None:
    agent = Agent(model="scripted", base_url="http://127.0.0.1:1/v1")
    with pytest.raises(error, match=message):
        agent.run_stream("Go.", **options)


async def test_run_is_resumed_with_its_own_session_only(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([PAY], "Paid.")
    agent = in_process.agent(tools=[pay])
    await agent.run("Pay.", session=MemorySession("chat_1"), ledger=ledger, run_id="run_1")
    await agent.run("Pay.", ledger=ledger, run_id="run_2")
    for session in (None, MemorySession("chat_2")):
        with pytest.raises(InvalidRequest, match="is part of the session 'chat_1'") as refused:
            await agent.resume("run_1", session=session, ledger=ledger)
        assert (refused.value.param, refused.value.code) == ("session", "other_session")
    with pytest.raises(InvalidRequest, match="The run 'run_2' has no session"):
        await agent.resume("run_2", session=MemorySession(), ledger=ledger)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConversationSession("conv_1"), "requires either a base_url or an engine"),
        (lambda: ConversationSession("", base_url="http://127.0.0.1:1/v1"), "a session needs the id"),
        (lambda: ConversationSession("conv_1", base_url="localhost/v1"), "must begin with http"),
        (lambda: SqliteSession("chats.db", ""), "a session needs an id"),
    ],
)
def test_invalid_sessions_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


async def test_unknown_conversation_is_an_error(in_process: ScriptedModel, shared_server: SharedServer) -> None:
    session = ConversationSession("conv_unknown", base_url=f"{shared_server.server.url}/v1")
    with pytest.raises(AntiphonError, match="conv_unknown") as raised:
        await in_process.agent().run("Hi!", session=session)
    await session.close()
    assert raised.value.code == "not_found"


async def test_file_that_is_no_database_is_refused(in_process: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "chats.db").write_text("no database" * 100)
    session = SqliteSession(tmp_path / "chats.db", "chat_1")
    with pytest.raises(ConfigError, match=r"The file of the session .* cannot be opened"):
        await in_process.agent().run("Hi!", session=session)
    await session.close()
    with pytest.raises(Unavailable, match="The session is closed"):
        await session.list_items()
    assert (tmp_path / "chats.db").read_text().startswith("no database")
