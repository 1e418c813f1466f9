"""Driver of our agent, over HTTP.

python -m benchmarks.drivers.antiphon URL
"""

from collections.abc import Callable

from antiphon import Agent, Limits, tool
from antiphon.agent.outcome import RunEnded, TextDelta
from antiphon.agent.transports.base import Transport
from antiphon.agent.transports.http import HttpTransport
from benchmarks.drivers.agent_driver import Run, RunResult, look_up, serve_tasks
from benchmarks.tasks import QUESTION, Task


def make_run(transport: Transport, task: Task) -> Run:
    agent = Agent(model=task.name, transport=transport, tools=[tool(look_up)], limits=Limits(turns=100))

    async def run_streamed() -> RunResult:
        pieces = 0
        text = ""
        async for event in agent.run_stream(QUESTION):
            if isinstance(event, TextDelta):
                pieces += 1
            elif isinstance(event, RunEnded):
                text = event.outcome.text
        return RunResult(text, pieces)

    async def run() -> RunResult:
        return RunResult((await agent.run(QUESTION)).text, 0)

    return run_streamed if task.streamed else run


async def connect(base_url: str) -> Callable[[Task], Run]:
    transport = HttpTransport(base_url, api_key="none")
    return lambda task: make_run(transport, task)


if __name__ == "__main__":
    serve_tasks(connect)
