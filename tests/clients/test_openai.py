"""The OpenAI SDK for Python against a real server, with its synchronous and its asynchronous client."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

SCRIPT = {
    "models": ["scripted"],
    "rules": [
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "profile", "answers": ['{"name": "ada", "age": 36}']},
        {"user": "wait", "answers": [[{"text": ["first"]}, {"wait": "gate"}, {"text": [" last"]}]]},
    ],
}


class Profile(BaseModel):
    name: str
    age: int


class Client:
    """One interface for both clients: it awaits awaitables and reads streams to the end."""

    def __init__(self, client: Any) -> None:
        self.raw = client
        self.responses = client.responses
        self.conversations = client.conversations

    async def do(self, result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def all(self, result: Any) -> list[Any]:
        """Return the events of a stream, or the items of all pages."""
        if inspect.isawaitable(result) and not hasattr(result, "__aiter__"):
            result = await result
        if hasattr(result, "__aiter__"):
            return [each async for each in result]
        return list(result)

    async def stream(self, manager: Any) -> tuple[list[Any], Any]:
        """Return the events of a stream helper and the final response."""
        if hasattr(manager, "__aenter__"):
            async with manager as stream:
                return [event async for event in stream], await stream.get_final_response()
        with manager as stream:
            return list(stream), stream.get_final_response()


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, server: Any) -> AsyncIterator[Client]:
    if request.param == "sync":
        with server.client() as sync_client:
            yield Client(sync_client)
    else:
        async with server.async_client() as async_client:
            yield Client(async_client)


def say(*texts: str) -> list[Any]:
    return [{"type": "message", "role": "user", "content": text} for text in texts]


def texts_of(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


def join(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def begin(client: Client, text: str = "hello there") -> Any:
    queued = await client.do(client.responses.create(model="scripted", input=text, background=True))
    assert queued.status == "queued"
    return queued


async def test_create_and_continue(client: Client) -> None:
    first = await client.do(client.responses.create(model="scripted", input="my name is ada"))
    second = await client.do(client.responses.create(model="scripted", input="recall", previous_response_id=first.id))
    assert (first.status, second.output_text) == ("completed", "Your name is ada.")


async def test_stream(client: Client) -> None:
    events, final = await client.stream(client.responses.stream(model="scripted", input="hello there"))
    assert (join(events), final.output_text) == ("You said: hello there", "You said: hello there")
    assert (await client.do(client.responses.retrieve(final.id))).output_text == final.output_text


async def test_create_with_a_raw_stream(client: Client) -> None:
    events = await client.all(client.responses.create(model="scripted", input="hello there", stream=True))
    assert join(events) == events[-1].response.output_text == "You said: hello there"


async def test_parse(client: Client) -> None:
    parsed = await client.do(client.responses.parse(model="scripted", input="profile", text_format=Profile))
    assert parsed.output_parsed == Profile(name="ada", age=36)


async def test_parse_a_stream(client: Client) -> None:
    _, final = await client.stream(client.responses.stream(model="scripted", input="profile", text_format=Profile))
    assert final.output_parsed == Profile(name="ada", age=36)


async def test_background_response_is_polled(client: Client) -> None:
    response = await begin(client)
    while response.status in ("queued", "in_progress"):
        response = await client.do(client.responses.retrieve(response.id))
    assert (response.status, response.output_text) == ("completed", "You said: hello there")


async def test_background_stream_is_resumed_from_any_event(client: Client) -> None:
    made = await begin(client)
    whole = await client.all(client.responses.retrieve(made.id, stream=True))
    assert whole[-1].type == "response.completed"
    for number in (0, 3, len(whole) - 2, len(whole) - 1):
        rest = await client.all(client.responses.retrieve(made.id, stream=True, starting_after=number))
        assert rest == whole[number + 1 :]


async def test_stream_helper_resumes_a_stream(client: Client) -> None:
    made = await begin(client)
    events, final = await client.stream(client.responses.stream(response_id=made.id, starting_after=2))
    assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    assert final.output_text == "You said: hello there"


async def test_resumed_stream_continues_live(client: Client, server: Any) -> None:
    made = await begin(client, "wait")
    server.wait_for(lambda: server.backend.reached("gate"))
    stream = await client.do(client.responses.retrieve(made.id, stream=True, starting_after=2))
    server.do(lambda: server.backend.release("gate"))
    assert join(await client.all(stream)) == "first last"


async def test_cancel(client: Client, server: Any) -> None:
    made = await begin(client, "wait")
    server.wait_for(lambda: server.backend.reached("gate"))
    cancelled = await client.do(client.responses.cancel(made.id))
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "first")
    assert await client.do(client.responses.cancel(made.id)) == cancelled
    assert await client.do(client.responses.retrieve(made.id)) == cancelled


async def test_delete(client: Client) -> None:
    made = await client.do(client.responses.create(model="scripted", input="hello"))
    assert await client.do(client.responses.delete(made.id)) is None
    with pytest.raises(openai.NotFoundError):
        await client.do(client.responses.retrieve(made.id))


async def test_input_items_are_listed_over_all_pages(client: Client) -> None:
    made = await client.do(client.responses.create(model="scripted", input=say("a", "b", "c", "d", "e")))
    items = await client.all(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert texts_of(items) == ["a", "b", "c", "d", "e"]


async def test_input_tokens(client: Client) -> None:
    counted = await client.do(client.responses.input_tokens.count(model="scripted", input="one two three"))
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 3)


async def test_conversation_is_created_updated_used_and_deleted(client: Client) -> None:
    conversations = client.conversations
    made = await client.do(conversations.create(items=say("my name is ada"), metadata={"topic": "names"}))
    assert (made.object, made.metadata) == ("conversation", {"topic": "names"})
    assert await client.do(conversations.retrieve(made.id)) == made
    updated = await client.do(conversations.update(made.id, metadata={"topic": "people"}))
    assert updated.metadata == {"topic": "people"}
    answer = await client.do(client.responses.create(model="scripted", input="recall", conversation=made.id))
    assert (answer.output_text, answer.conversation.id) == ("Your name is ada.", made.id)
    items = await client.all(conversations.items.list(made.id, limit=1, order="asc"))
    assert texts_of(items) == ["my name is ada", "recall", "Your name is ada."]
    deleted = await client.do(conversations.delete(made.id))
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    with pytest.raises(openai.NotFoundError):
        await client.do(conversations.retrieve(made.id))


async def test_conversation_items_are_added_read_and_deleted(client: Client) -> None:
    items = client.conversations.items
    made = await client.do(client.conversations.create())
    added = await client.do(items.create(made.id, items=say("one", "two")))
    assert (texts_of(added.data), added.has_more) == (["one", "two"], False)
    first, second = added.data
    assert await client.do(items.retrieve(first.id, conversation_id=made.id)) == first
    assert await client.do(items.delete(first.id, conversation_id=made.id)) == made
    assert await client.all(items.list(made.id)) == [second]
    with pytest.raises(openai.NotFoundError):
        await client.do(items.retrieve(first.id, conversation_id=made.id))


@pytest.mark.parametrize(
    ("call", "error", "param"),
    [
        (lambda c: c.responses.create(model="unknown", input="x"), openai.NotFoundError, "model"),
        (
            lambda c: c.responses.create(model="scripted", input="x", previous_response_id="resp_0"),
            openai.BadRequestError,
            "previous_response_id",
        ),
        (lambda c: c.responses.cancel("resp_0"), openai.NotFoundError, "response_id"),
        (lambda c: c.conversations.retrieve("conv_0"), openai.NotFoundError, "conversation_id"),
        (lambda c: c.conversations.create(items=say(*["x"] * 21)), openai.BadRequestError, "items"),
    ],
)
async def test_errors_have_their_class_and_parameter(
    client: Client, call: Callable[[Any], Any], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await client.do(call(client))
    assert raised.value.param == param


async def test_keepalive_events_are_ignored(serve: Any) -> None:
    server = serve(SCRIPT, keepalive_seconds=0.01)
    async with server.async_client() as client, client.responses.stream(model="scripted", input="wait") as stream:
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "keepalive":
                server.do(lambda: server.backend.release("gate"))
        final = await stream.get_final_response()
    assert (join(events), final.output_text) == ("first last", "first last")
