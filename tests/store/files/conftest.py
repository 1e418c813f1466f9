from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.store.files.content import Contents
from antiphon.store.files.database import FileDatabase
from antiphon.store.files.location import FileLocation
from antiphon.store.limits import DEFAULT_LIMITS


class Clock:
    """A clock that stands still until a test sets it."""

    time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> FileLocation:
    if request.param == "sqlite":
        return FileLocation(tmp_path / "files")
    return FileLocation(url=request.getfixturevalue("postgres_url"))


@pytest.fixture
async def opened(location: FileLocation, clock: Clock) -> AsyncIterator[tuple[FileDatabase, Contents]]:
    database, contents = await location.open(now=clock, limits=DEFAULT_LIMITS)
    yield database, contents
    await database.close()
    await contents.close()


@pytest.fixture
def database(opened: tuple[FileDatabase, Contents]) -> FileDatabase:
    return opened[0]


@pytest.fixture
def contents(opened: tuple[FileDatabase, Contents]) -> Contents:
    return opened[1]
