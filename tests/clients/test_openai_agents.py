"""The OpenAI Agents SDK for Python against a real server: two tools and a handoff, with state on the server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

PLAIN = RunConfig(tracing_disabled=True)
# The input grows with every turn, so the rule for the last turn comes first.
SCRIPT = {
    "rules": [
        {"user": "once more", "text": "Mild at noon", "answers": ["As I said: mild."]},
        {
            "last_item": "function_call_output",
            "text": '"assistant": "poet"',
            "answers": ["Mild at noon, said the poet."],
        },
        {"last_item": "function_call_output", "answers": [[{"tool_call": {"name": "transfer_to_poet"}}]]},
        {
            "user": "poem",
            "answers": [
                [
                    {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}},
                    {"tool_call": {"name": "get_time", "arguments": {"city": "Bern"}}},
                ]
            ],
        },
    ]
}


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[AsyncOpenAI]:
    async with server.async_client() as client:
        yield client


class Team:
    """An agent with two tools and a handoff to a poet. `calls` records the tool calls."""

    def __init__(self, client: AsyncOpenAI, model: OpenAIResponsesModel | None = None) -> None:
        self.calls: list[str] = []
        model = model or OpenAIResponsesModel(model="scripted", openai_client=client)

        @function_tool
        def get_weather(city: str) -> str:
            self.calls.append(f"weather in {city}")
            return "mild"

        @function_tool
        def get_time(city: str) -> str:
            self.calls.append(f"time in {city}")
            return "noon"

        poet = Agent(name="poet", instructions="Rhyme.", model=model)
        self.guide = Agent(
            name="guide", instructions="Find out.", model=model, tools=[get_weather, get_time], handoffs=[poet]
        )

    async def run(self, text: str, **options: Any) -> Any:
        return await Runner.run(self.guide, text, run_config=PLAIN, **options)


def check_result(team: Team, result: Any) -> None:
    assert (result.final_output, result.last_agent.name) == ("Mild at noon, said the poet.", "poet")
    assert sorted(team.calls) == ["time in Bern", "weather in Bern"]  # they run concurrently


async def test_run_continues_with_previous_response_id(client: AsyncOpenAI) -> None:
    team = Team(client)
    result = await team.run("a poem", auto_previous_response_id=True)
    check_result(team, result)
    responses = [await client.responses.retrieve(each.response_id) for each in result.raw_responses]
    assert [response.previous_response_id for response in responses] == [None, responses[0].id, responses[1].id]
    again = await team.run("once more", previous_response_id=result.last_response_id)
    assert again.final_output == "As I said: mild."


async def test_run_continues_in_a_conversation(client: AsyncOpenAI) -> None:
    team = Team(client)
    conversation = await client.conversations.create()
    check_result(team, await team.run("a poem", conversation_id=conversation.id))
    again = await team.run("once more", conversation_id=conversation.id)
    assert again.final_output == "As I said: mild."
    items = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert items == [
        "message",
        *["function_call"] * 2,
        *["function_call_output"] * 2,
        "function_call",
        "function_call_output",
        "message",
        "message",
        "message",
    ]


async def test_run_continues_in_a_conversations_session(client: AsyncOpenAI) -> None:
    team = Team(client)
    session = OpenAIConversationsSession(openai_client=client)
    check_result(team, await team.run("a poem", session=session))
    again = await team.run("once more", session=session)
    assert again.final_output == "As I said: mild."
    assert len(await session.get_items()) == 10
    last: Any = await session.pop_item()
    assert last["content"][0]["text"] == "As I said: mild."
    assert len(await session.get_items()) == 9
    await session.clear_session()


async def test_streamed(client: AsyncOpenAI) -> None:
    team = Team(client)
    result = Runner.run_streamed(team.guide, "a poem", run_config=PLAIN, auto_previous_response_id=True)
    types = [event.type async for event in result.stream_events()]
    check_result(team, result)
    assert {"raw_response_event", "run_item_stream_event", "agent_updated_stream_event"} <= set(types)


@pytest.mark.parametrize("options", [{}, {"auto_previous_response_id": True}], ids=["history", "chain"])
async def test_run_over_websocket(client: AsyncOpenAI, options: dict[str, Any]) -> None:
    model = OpenAIResponsesWSModel(model="scripted", openai_client=client)
    team = Team(client, model)
    result = await team.run("a poem", **options)
    check_result(team, result)
    again = await team.run("once more", previous_response_id=result.last_response_id)
    assert again.final_output == "As I said: mild."
    await model.close()
