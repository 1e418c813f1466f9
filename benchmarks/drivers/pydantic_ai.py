"""Driver of pydantic-ai.

python -m benchmarks.drivers.pydantic_ai URL
"""

from collections.abc import Callable

from pydantic_ai import Agent, AgentRunResultEvent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.drivers.agent_driver import Run, RunResult, look_up, serve_tasks
from benchmarks.tasks import QUESTION, Task


def make_run(provider: OpenAIProvider, task: Task) -> Run:
    agent = Agent(OpenAIResponsesModel(task.name, provider=provider), tools=[look_up])

    async def run_streamed() -> RunResult:
        pieces = 0
        text = ""
        async with agent.run_stream_events(QUESTION) as events:
            async for event in events:
                if isinstance(event, PartDeltaEvent):
                    pieces += isinstance(event.delta, TextPartDelta)
                elif isinstance(event, PartStartEvent):
                    # The start event of a part contains its first delta.
                    pieces += isinstance(event.part, TextPart)
                elif isinstance(event, AgentRunResultEvent):
                    text = event.result.output
        return RunResult(text, pieces)

    async def run() -> RunResult:
        return RunResult((await agent.run(QUESTION)).output, 0)

    return run_streamed if task.streamed else run


async def connect(base_url: str) -> Callable[[Task], Run]:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return lambda task: make_run(provider, task)


if __name__ == "__main__":
    serve_tasks(connect)
