"""Our agent on an engine of its own process, which says the same: there is no upstream.

python -m benchmarks.drivers.in_process URL
"""

from collections.abc import Callable

from antiphon.agent.local import LocalTransport
from antiphon.engine.engine import Engine
from antiphon.store.location import locate_store
from benchmarks.drivers import antiphon
from benchmarks.drivers.stage import Run, perform
from benchmarks.rehearsal import Rehearsal
from benchmarks.tasks import Task


async def connect(base_url: str) -> Callable[[Task], Run]:
    engine = Engine(backends={"rehearsal": Rehearsal()}, store=locate_store("memory:"))
    await engine.start()
    transport = LocalTransport(engine)
    return lambda task: antiphon.make(transport, task)


if __name__ == "__main__":
    perform(connect)
