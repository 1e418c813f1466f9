"""Questions between the processes that share a PostgreSQL database."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from antiphon.errors import ConfigError
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store
from antiphon.store.peer_link import PeersUnresponsive

pytest.importorskip("asyncpg")

import asyncpg

from antiphon.store.postgres import notifications as notifications_module
from antiphon.store.postgres import peer_link
from antiphon.store.postgres.inspection import ask_processes
from antiphon.store.postgres.notifications import HOLD_LOCK, LISTENERS
from antiphon.store.postgres.peer_link import PostgresPeerLink
from antiphon.store.postgres.store import PostgresStore
from support.postgres_server import EmptySchema

TIMEOUT = 60


async def open_link(url: str, stack: AsyncExitStack) -> PostgresPeerLink:
    """Open a store, and return its link when it listens."""
    store = locate_store(url)
    assert isinstance(store, PostgresStore)
    await store.open()
    stack.push_async_callback(store.close)
    listening = asyncio.Event()
    store.on_change = lambda _: listening.set()
    async with asyncio.timeout(TIMEOUT):
        await listening.wait()
    assert store.peer_link is not None
    return store.peer_link


async def open_links(url: str, stack: AsyncExitStack, count: int) -> list[PostgresPeerLink]:
    """Open links, and wait until the database has no others: those of an earlier test may end late."""
    links = [await open_link(url, stack) for _ in range(count)]
    async with asyncio.timeout(TIMEOUT):
        channel = links[0]._notifications.channel
        while len(await links[0]._pool.submit(LISTENERS, (channel,))) > count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return links


@pytest.fixture
async def links(postgres_url: str) -> AsyncIterator[list[PostgresPeerLink]]:
    async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT):
        yield await open_links(postgres_url, stack, 3)


@pytest.fixture(autouse=True)
def _no_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each question once, however slow the machine is."""
    monkeypatch.setattr(peer_link, "RESEND_SECONDS", float(TIMEOUT))


async def repeat(payload: bytes) -> bytes:
    return payload * 2


async def fail_to_ask(
    link: PostgresPeerLink, kind: str, monkeypatch: pytest.MonkeyPatch, *, until: Callable[[], bool]
) -> PeersUnresponsive:
    """Ask a question whose time has passed when `until` is true. Return the error."""
    asking = asyncio.create_task(link.ask(kind))
    while not until():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with monkeypatch.context() as patch, pytest.raises(PeersUnresponsive) as error:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + link._seconds)
        await asking
    return error.value


async def test_answer_is_returned_to_the_sender_of_the_question(links: list[PostgresPeerLink]) -> None:
    first, second, third = links
    received = asyncio.Queue[bytes]()

    async def record(payload: bytes) -> bytes:
        received.put_nowait(payload)
        return b""

    second.answers["repeat"] = repeat
    third.answers["repeat"] = record
    questions = [bytes([number]) * 20_000 for number in range(32)]  # more than may wait at once, in several parts
    answers = await asyncio.gather(*(first.ask("repeat", question) for question in questions))
    assert answers == [[question * 2] for question in questions]
    assert sorted([await received.get() for _ in questions]) == questions
    assert await third.ask("repeat", b"a") == [b"aa"]
    assert await second.ask("repeat", b"a") == []  # a process does not ask itself
    assert await first.ask("unknown", b"a") == []


async def test_failed_answer_counts_as_none(links: list[PostgresPeerLink], caplog: pytest.LogCaptureFixture) -> None:
    async def fail(payload: bytes) -> bytes:
        raise RuntimeError("broken")

    links[1].answers["fail"] = fail
    with caplog.at_level(logging.ERROR):
        assert await links[0].ask("fail") == []
    assert [record.getMessage() for record in caplog.records] == ["a question of another process failed"]


async def test_process_that_does_not_answer_is_waited_for_once(
    links: list[PostgresPeerLink],
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links[1].answers["repeat"] = repeat
    frozen = await asyncpg.connect(postgres_url)
    try:
        await frozen.execute(HOLD_LOCK, links[0]._notifications.channel)
        assert await links[0].ask("repeat", b"a") == [b"aa"]  # the first answer is enough
        missing = {frozen.get_server_pid()}
        began_at = time.monotonic()
        first = await fail_to_ask(
            links[0],
            "unknown",
            monkeypatch,
            until=lambda: [question.missing for question in links[0]._pending.values()] == [missing],
        )
        assert 0 < first.seconds <= time.monotonic() - began_at
        links[0]._seconds = 10.0 * TIMEOUT
        with pytest.raises(PeersUnresponsive) as second:
            await links[0].ask("unknown")
        assert first.seconds < second.value.seconds
        assert await links[0].ask_all("unknown") == []
        assert await links[0].ask("repeat", b"a") == [b"aa"]
    finally:
        await frozen.close()
    assert await links[0].ask("unknown") == []  # the process has ended
    assert [record.getMessage() for record in caplog.records] == ["processes that share the database did not answer: 1"]


async def test_lost_own_connection_does_not_make_others_unresponsive(
    links: list[PostgresPeerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = links
    notifications = first._notifications
    listener, answered = notifications.listener, asyncio.Event()
    questions: list[bytes] = []

    async def lose_connection(payload: bytes) -> bytes:
        notifications.listener = None
        questions.append(payload)
        await answered.wait()
        return b""

    second.answers["lose"] = third.answers["lose"] = lose_connection
    second.answers["repeat"] = repeat
    await fail_to_ask(first, "lose", monkeypatch, until=lambda: len(questions) == 2)
    notifications.listener, first._seconds = listener, TIMEOUT
    assert await first.ask("repeat", b"a") == [b"aa"]
    answered.set()


@pytest.mark.parametrize("lost", ["question", "answer"])
async def test_lost_notification_costs_a_second_try(
    links: list[PostgresPeerLink], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(peer_link, "RESEND_SECONDS", 0.05)
    first, second, third = links
    second.answers["repeat"] = repeat
    third.answers["repeat"] = _answer_nothing
    sender = (first if lost == "question" else second)._notifications
    send = sender.send_message
    tries: list[str] = []

    def lose_first(text: str) -> None:
        tries.append(text)
        if len(tries) > 1:
            send(text)

    sender.send_message = lose_first  # type: ignore[method-assign]
    assert await first.ask("repeat", b"a") == [b"aa"]
    assert len(tries) >= 2
    assert await first.ask_all("repeat", b"b") == [b"bb"]  # an answer that came twice counts once


async def _answer_nothing(payload: bytes) -> bytes:
    return b""


async def test_question_waits_for_processes_that_reconnect(
    links: list[PostgresPeerLink], postgres_schema: EmptySchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database ends all connections. A question right after that reaches the others as soon as they listen."""
    monkeypatch.setattr(peer_link, "RESEND_SECONDS", 0.05)
    monkeypatch.setattr(peer_link, "SETTLE_SECONDS", float(TIMEOUT))
    monkeypatch.setattr(notifications_module, "RECONNECT_SECONDS", 0.05)
    first, second, _ = links
    first._seconds = float(TIMEOUT)
    second.answers["repeat"] = repeat
    listeners = [link._notifications.listener for link in links]
    postgres_schema.fetch(f"SELECT pg_terminate_backend(pid, 60000) FROM unnest(ARRAY{listeners}::integer[]) AS pid")
    assert await first.ask("repeat", b"a") == [b"aa"]


async def test_process_alone_on_its_database_asks_no_question(postgres_url: str) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT):
        (link,) = await open_links(postgres_url, stack, 1)
        sent: list[str] = []
        link._notifications.send_message = sent.append  # type: ignore[method-assign]
        assert await link.ask("repeat", b"a") == []
        assert sent == []


async def test_foreign_notification_is_ignored(links: list[PostgresPeerLink], caplog: pytest.LogCaptureFixture) -> None:
    links[1].answers["repeat"] = repeat
    for text in ("", "0 a 0 1 =", "0 a 0 1 AAAA", "0 a 1 2 AAAA", "0 a x y AAAA"):
        links[0]._notifications.send_message(text)  # before the question
    assert await links[0].ask("repeat", b"a") == [b"aa"]
    assert set(caplog.messages) == {"a notification cannot be read"}


class LogQueue(logging.Handler):
    """The messages of a logger, as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = asyncio.Queue[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.put_nowait(record.getMessage())


async def read_warning(postgres_url: str, listen_url: str) -> str:
    """Return the first message about the notifications of a store with this `store_listen_url`."""
    store = locate_store(postgres_url, limits=StoreLimits(listen_url=listen_url))
    log = LogQueue()
    notifications_module.logger.addHandler(log)
    try:
        await store.open()
        store.on_change = lambda *_: None
        message = await asyncio.wait_for(log.messages.get(), TIMEOUT)
        await store.close()
    finally:
        notifications_module.logger.removeHandler(log)
    return message


async def test_wrong_url_for_notifications_is_reported(postgres_url: str) -> None:
    message = await read_warning(postgres_url, f"{postgres_url}&sslmode")
    assert message.startswith("notifications are not received: The store 127.0.0.1:")
    assert message.endswith("/postgres cannot be opened: the URL is invalid.")


async def test_url_of_another_database_for_notifications_is_reported(
    postgres_server: str, postgres_url: str, other_database: str
) -> None:
    message = await read_warning(postgres_url, other_database)
    assert message.startswith("notifications are not received: store_listen_url: 127.0.0.1:")
    assert message.endswith(" is another database than that of the store. Set it to the URL of the same database.")
    with pytest.raises(ConfigError, match=r"^store_listen_url: .* is another database than that of the store"):
        await ask_processes(postgres_url, "settings", seconds=1, listen_url=other_database)
    # Another schema is not another database: the channel has the name of the store's schema.
    answers = await ask_processes(postgres_url, "settings", seconds=TIMEOUT, listen_url=postgres_server)
    assert answers == []
