"""The engine on the store's queue, with shared limits that are never reached. See desk.py for the command."""

from antiphon.store.limits import RunLimits
from benchmarks.drivers import lease_queue
from benchmarks.drivers.desk import Place, serve

LIMITS = RunLimits(concurrency=1000, concurrency_per_project=1000, starts_per_minute=1_000_000)


async def open_queue(place: Place) -> lease_queue.LeaseQueue:
    return await lease_queue.open_queue(place, LIMITS)


if __name__ == "__main__":
    serve(open_queue)
