"""Driver of the lease queue with shared limits that are never reached. See queue_driver.py for the command."""

from antiphon.store.limits import RunLimits
from benchmarks.drivers import lease_queue
from benchmarks.drivers.queue_driver import Arguments, serve

LIMITS = RunLimits(concurrency=1000, concurrency_per_project=1000, starts_per_minute=1_000_000)


async def open_queue(arguments: Arguments) -> lease_queue.LeaseQueue:
    return await lease_queue.open_queue(arguments, LIMITS)


if __name__ == "__main__":
    serve(open_queue)
