"""The link of a worker to its supervisor, and its engine."""

import asyncio
import socket
import time
from pathlib import Path

from antiphon.engine.policy import Policy
from antiphon.server.workers.link import SupervisorLink
from antiphon.server.workers.messages import Channel, WorkerDied, WorkerReady
from antiphon.server.workers.peers import WorkerPeers
from antiphon.store.sqlite.store import SqliteStore
from support.engine_harness import EngineHarness
from support.live_server import TIMEOUT

LEASE = 600


async def test_run_of_a_dead_worker_is_taken_over_during_its_lease(tmp_path: Path) -> None:
    dead, other = [
        EngineHarness({"default": "done"}, SqliteStore(tmp_path / "store.db"), Policy(background_lease_seconds=LEASE))
        for _ in range(2)
    ]
    await dead.engine.start()
    dead.engine.start_draining()
    run = await dead.ask("hi", background=True)
    await dead.store.claim("dead", as_of=time.time(), lease=LEASE, limit=1)
    await other.engine.start()

    ours, theirs = socket.socketpair()
    supervisor, link = await Channel.open(ours), SupervisorLink(theirs)
    WorkerPeers(link, other.engine, None)
    await link.open(WorkerReady([], needs_key=False))
    supervisor.send(WorkerDied("dead"))
    async with asyncio.timeout(TIMEOUT):
        events = [
            event async for page in await other.engine.follow("default", run.response.id, after=-1) for event in page
        ]
    assert b"response.completed" in events[-1].raw

    supervisor.close()
    for harness in (dead, other):
        await harness.engine.close()
