"""Hosted tools with the OpenAI SDK for Python, over a real socket."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner

from antiphon.store.location import locate_store
from antiphon.tools.hosted.registry import HostedTools
from support.hosted_tool import RecordingTool
from support.live_server import LiveServer, make_settings

SEARCH: Any = {"type": "file_search", "vector_store_ids": ["vs_1"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
RESULTS = "file_search_call.results"


def make_call(query: str) -> dict[str, Any]:
    return {"tool_call": {"name": "file_search", "arguments": {"queries": [query]}}}


SCRIPT: dict[str, Any] = {
    "native_tools": ["function"],
    "rules": [
        {"text": "sunny", "answers": ["Sunny, and cats."]},
        {"user": "both", "answers": [[{"tool_call": {"name": "get_weather", "arguments": {}}}, make_call("cats")]]},
        {"last_item": "function_call_output", "answers": ["Found it."]},
        {"user": "cats", "answers": [[{"reasoning": "Search."}, make_call("cats")]]},
    ],
}


@pytest.fixture(scope="module")
def tool() -> RecordingTool:
    return RecordingTool()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tool: RecordingTool) -> Iterator[LiveServer]:
    store = locate_store(f"sqlite:///{tmp_path_factory.mktemp('data')}/antiphon.db")
    server = LiveServer(SCRIPT, make_settings(), store, hosted_tools=HostedTools([tool]))
    yield server
    server.stop()


@pytest.fixture
def client(running: LiveServer) -> OpenAI:
    return running.client()


def get_results(output: Any) -> list[Any]:
    """Return the texts of the results of each file search, or None for hidden results."""
    calls = [item for item in output if item.type == "file_search_call"]
    return [call.results and [result.text for result in call.results] for call in calls]


SHOWN = [["Text about cats."]]
HIDDEN = [None]


def test_stream_helper_accepts_all_rounds_as_one_response(client: OpenAI) -> None:
    with client.responses.stream(model="scripted", input="find cats", tools=[SEARCH]) as stream:
        types = [event.type for event in stream]
        response = stream.get_final_response()
    assert types.count("response.created") == types.count("response.completed") == 1
    assert [item.type for item in response.output] == ["reasoning", "file_search_call", "message"]
    assert response.output_text == "Found it."
    assert get_results(response.output) == HIDDEN


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_mixes_hosted_tools_and_functions(client: OpenAI, stream: bool) -> None:
    runner = ResponsesToolRunner(functions=[RegisteredFunction(WEATHER, lambda _: "sunny")])
    params: Any = {"model": "scripted", "input": "both", "tools": [SEARCH]}
    response = runner.run(client, params, max_steps=4, stream=stream)
    assert response.output_text == "Sunny, and cats."


def test_include_shows_results_on_every_path(client: OpenAI) -> None:
    fields: Any = {"model": "scripted", "input": "find cats", "tools": [SEARCH]}
    hidden = client.responses.create(**fields)
    shown = client.responses.create(**fields, include=[RESULTS])
    assert (get_results(hidden.output), get_results(shown.output)) == (HIDDEN, SHOWN)
    assert get_results(client.responses.retrieve(hidden.id).output) == HIDDEN
    assert get_results(client.responses.retrieve(hidden.id, include=[RESULTS]).output) == SHOWN
    streamed = list(client.responses.create(**fields, stream=True, include=[RESULTS]))
    assert get_results([event.item for event in streamed if event.type == "response.output_item.done"]) == SHOWN
    assert get_results(streamed[-1].response.output) == SHOWN
    replayed = client.responses.create(model="scripted", input=[*shown.output, {"role": "user", "content": "and?"}])
    assert get_results(client.responses.input_items.list(replayed.id)) == HIDDEN
    assert get_results(client.responses.input_items.list(replayed.id, include=[RESULTS])) == SHOWN


def test_conversation_lists_hosted_items_with_include(client: OpenAI) -> None:
    conversation = client.conversations.create()
    client.responses.create(model="scripted", input="find cats", tools=[SEARCH], conversation=conversation.id)
    assert get_results(client.conversations.items.list(conversation.id)) == HIDDEN
    assert get_results(client.conversations.items.list(conversation.id, include=[RESULTS])) == SHOWN
    again = client.responses.create(model="scripted", input="thanks", conversation=conversation.id)
    assert again.status == "completed"


def test_background_response_runs_hosted_tools(client: OpenAI) -> None:
    fields: Any = {"model": "scripted", "input": "find cats", "tools": [SEARCH], "background": True}
    events = list(client.responses.create(**fields, stream=True))
    assert events[-1].type == "response.completed"
    assert get_results(events[-1].response.output) == HIDDEN
    followed = list(client.responses.retrieve(events[0].response.id, stream=True, include=[RESULTS]))
    assert get_results(followed[-1].response.output) == SHOWN
    assert [event.sequence_number for event in followed] == list(range(len(events)))


def test_response_that_is_not_stored_continues_with_its_items(client: OpenAI) -> None:
    first = client.responses.create(model="scripted", input="find cats", tools=[SEARCH], store=False, include=[RESULTS])
    items: Any = [{"role": "user", "content": "find cats"}, *first.output, {"role": "user", "content": "thanks"}]
    second = client.responses.create(model="scripted", input=items, tools=[SEARCH], store=False)
    assert (second.status, second.output_text) == ("completed", "You said: thanks")


async def test_websocket_runs_hosted_tools(running: LiveServer) -> None:
    async with running.async_client() as client, client.responses.connect() as connection:
        await connection.response.create(model="scripted", input="find cats", tools=[SEARCH], store=False)
        events: list[Any] = []
        while not events or events[-1].type != "response.completed":
            events.append(await connection.recv())
        await connection.response.create(
            model="scripted", input="thanks", previous_response_id=events[-1].response.id, store=False
        )
        while events[-1].type != "response.completed" or events[-1].response.output_text == "Found it.":
            events.append(await connection.recv())
    assert [item.type for item in events[-1].response.output] == ["message"]


def test_forced_hosted_tool_works_with_the_embedded_model(embedded: LiveServer) -> None:
    response = embedded.client().responses.create(
        model="smollm2-135m",
        input="Search the files for cats.",
        tools=[SEARCH],
        tool_choice={"type": "file_search"},
        max_output_tokens=40,
        max_tool_calls=1,
    )
    assert response.output[0].type == "file_search_call"
    assert response.status in ("completed", "incomplete")
