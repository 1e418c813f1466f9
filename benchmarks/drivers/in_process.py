"""Driver of our agent on an engine in the same process, without an upstream.

python -m benchmarks.drivers.in_process URL
"""

from collections.abc import Callable

from antiphon.agent.transports.engine import LocalTransport
from antiphon.engine.engine import Engine
from antiphon.store.location import locate_store
from benchmarks.drivers import antiphon
from benchmarks.drivers.agent_driver import Run, serve_tasks
from benchmarks.task_backend import TaskBackend
from benchmarks.tasks import Task


async def connect(base_url: str) -> Callable[[Task], Run]:
    engine = Engine(backends={"tasks": TaskBackend()}, store=locate_store("memory:"))
    await engine.start()
    transport = LocalTransport(engine)
    return lambda task: antiphon.make_run(transport, task)


if __name__ == "__main__":
    serve_tasks(connect)
