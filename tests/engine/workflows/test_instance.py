"""DBOS in a process that others use too, and on a file that is lost."""

import logging
import shutil
from pathlib import Path

import pytest
from dbos import DBOS

from workflow_bench import DONE, SLOW, Start, ask, finish, wait_until

# DBOS has made it, and ended before it began.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*coroutine object execute_dequeued_workflow:pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_database_that_is_lost_while_it_is_in_use_is_made_anew(
    start: Start, tmp_path: Path, prepared: Path, replaced: bool
) -> None:
    bench = await start(SLOW)
    running = await ask(bench)
    await bench.backend.reached("gate")
    for ending in ("", "-wal", "-shm"):
        (tmp_path / f"dbos.db{ending}").unlink()
    if replaced:
        shutil.copy(prepared, tmp_path / "dbos.db")
    others = [await ask(bench) for _ in range(5)]
    for _ in others:
        await bench.backend.reached("gate")
    for _ in (running, *others):
        bench.backend.release("gate")
    assert [await finish(bench, each) for each in (running, *others)] == [DONE] * 6


async def test_an_application_with_a_dbos_of_its_own_keeps_it(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = DBOS(config={"name": "theirs", "system_database_url": f"sqlite:///{tmp_path}/theirs.db"})
    bench = await start({})
    with caplog.at_level(logging.WARNING):
        response_id = await ask(bench)

        async def is_told() -> bool:
            return any("this process already uses DBOS for something else" in line for line in caplog.messages)

        await wait_until(is_told)
    assert DBOS(config={"name": "another"}) is theirs
    DBOS.destroy()
    assert (await finish(bench, response_id))[0] == "completed"
