"""The limit on the stored data of a project."""

import pytest

from antiphon.engine.policy import Policy
from antiphon.engine.storage_quota import MEASURE_SECONDS, StorageQuota
from antiphon.errors import QuotaExceeded, StoreUnavailable
from antiphon.store.memory.store import MemoryStore


class MeasuredStore(MemoryStore):
    """Returns the sizes that a test sets, and counts the measurements."""

    size: int | None = 0
    measurements = 0

    async def measure_stored_bytes(self, project: str) -> int:
        self.measurements += 1
        if self.size is None:
            raise StoreUnavailable("The store is down.")
        return self.size


class Clock:
    time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_policy_without_a_limit_has_no_quota() -> None:
    assert StorageQuota.make(MemoryStore(), Policy()) is None
    assert StorageQuota.make(MemoryStore(), Policy(stored_bytes_by_project={"p": 1})) is not None


async def test_size_is_measured_once_in_an_interval(clock: Clock) -> None:
    store = MeasuredStore()
    quota = StorageQuota(store, 10, {}, monotonic=clock)
    for _ in range(3):
        await quota.check("p")
    await quota.check("q")
    assert store.measurements == 2
    clock.time += MEASURE_SECONDS
    await quota.check("p")
    assert quota._measurements["p"].task is not None


async def test_project_at_its_limit_is_refused_until_data_is_deleted(clock: Clock) -> None:
    store = MeasuredStore()
    store.size = 10
    quota = StorageQuota(store, None, {"p": 10}, monotonic=clock)
    for _ in range(2):
        with pytest.raises(QuotaExceeded) as refused:
            await quota.check("p")
    assert (refused.value.code, refused.value.retry_after) == ("insufficient_quota", None)
    assert refused.value.message.startswith(
        "The data of this project has 10 bytes, and the limit `projects.p.limits.stored_bytes` is 10."
    )
    await quota.check("q")
    store.size = 9
    clock.time += MEASURE_SECONDS
    await quota.check("p")
    assert (quota.refusals, store.measurements) == (2, 2)


async def test_failed_measurement_does_not_refuse_requests(clock: Clock) -> None:
    store = MeasuredStore()
    store.size = None
    await StorageQuota(store, 10, {}, monotonic=clock).check("p")
