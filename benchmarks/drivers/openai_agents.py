"""Driver of openai-agents.

python -m benchmarks.drivers.openai_agents URL
"""

from collections.abc import Callable

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from benchmarks.drivers.agent_driver import Run, RunResult, look_up, serve_tasks
from benchmarks.tasks import QUESTION, Task

_TURNS = 100


def make_run(client: AsyncOpenAI, task: Task) -> Run:
    model = OpenAIResponsesModel(task.name, client)
    agent = Agent(name="agent", model=model, tools=[function_tool(look_up)])

    async def run_streamed() -> RunResult:
        pieces = 0
        running = Runner.run_streamed(agent, QUESTION, max_turns=_TURNS)
        async for event in running.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces += 1
        return RunResult(running.final_output, pieces)

    async def run() -> RunResult:
        return RunResult((await Runner.run(agent, QUESTION, max_turns=_TURNS)).final_output, 0)

    return run_streamed if task.streamed else run


async def connect(base_url: str) -> Callable[[Task], Run]:
    # Tracing sends data to a service.
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    return lambda task: make_run(client, task)


if __name__ == "__main__":
    serve_tasks(connect)
