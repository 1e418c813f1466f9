"""The agent of pydantic-ai.

python -m benchmarks.drivers.pydantic_ai URL
"""

from collections.abc import Callable

from pydantic_ai import Agent, AgentRunResultEvent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.drivers.stage import Heard, Run, look_up, perform
from benchmarks.tasks import QUESTION, Task


def make(provider: OpenAIProvider, task: Task) -> Run:
    agent = Agent(OpenAIResponsesModel(task.name, provider=provider), tools=[look_up])

    async def run_streamed() -> Heard:
        pieces = 0
        text = ""
        async with agent.run_stream_events(QUESTION) as events:
            async for event in events:
                if isinstance(event, PartDeltaEvent):
                    pieces += isinstance(event.delta, TextPartDelta)
                elif isinstance(event, PartStartEvent):
                    # The first piece of a text comes with the news of its part.
                    pieces += isinstance(event.part, TextPart)
                elif isinstance(event, AgentRunResultEvent):
                    text = event.result.output
        return Heard(text, pieces)

    async def run() -> Heard:
        return Heard((await agent.run(QUESTION)).output, 0)

    return run_streamed if task.streamed else run


async def connect(base_url: str) -> Callable[[Task], Run]:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return lambda task: make(provider, task)


if __name__ == "__main__":
    perform(connect)
