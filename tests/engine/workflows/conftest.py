import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from antiphon.config import DbosSettings
from antiphon.engine.policy import Policy
from antiphon.store.memory.store import MemoryStore
from antiphon.store.sqlite.store import SqliteStore
from engine_bench import Bench
from workflow_bench import Start, ask, finish


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of DBOS that has its tables and our queue: making these takes longer than a test."""
    path = tmp_path_factory.mktemp("dbos") / "system.db"

    async def prepare() -> None:
        bench = Bench({}, MemoryStore(), Policy(dbos=DbosSettings(database=f"sqlite:///{path}", polling_seconds=0.01)))
        await bench.engine.start()
        await finish(bench, await ask(bench))
        await bench.engine.close()

    asyncio.run(prepare())
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM workflow_status")
        database.commit()
    return path


@pytest.fixture
def start(make_bench: Any, tmp_path: Path, prepared: Path) -> Start:
    """An engine on a store and a DBOS that outlive it."""
    shutil.copy(prepared, tmp_path / "dbos.db")

    async def start_engine(script: dict[str, Any], *, slots: int = 9, home: str | None = None, **limits: Any) -> Bench:
        bench: Bench = await make_bench(
            script,
            store=SqliteStore(tmp_path / "store.db", home=home),
            background_lease_seconds=0.3,
            background_slots=slots,
            dbos=DbosSettings(database=f"sqlite:///{tmp_path}/dbos.db", polling_seconds=0.01, **limits),
        )
        return bench

    return start_engine
