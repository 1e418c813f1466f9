"""The chat model of LangChain against a real server, with message content in the format of the Responses API."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_openai.tools import custom_tool
from pydantic import BaseModel

SCRIPT = {
    "rules": [
        {"user": "recall", "text": "ada", "answers": ["Your name is ada."]},
        {"user": "profile", "answers": ['{"name": "ada", "age": 36}']},
        {"last_item": "function_call_output", "text": "mild", "answers": ["It is mild."]},
        {
            "user": "weather",
            "answers": [
                [
                    {"summary": "A tool knows."},
                    {"reasoning": "Private reasoning."},
                    {"tool_call": {"name": "get_weather", "arguments": ['{"city":', ' "Bern"}']}},
                ]
            ],
        },
        {"last_item": "custom_tool_call_output", "text": "drew a cat", "answers": ["Here is a cat."]},
        {"user": "draw", "answers": [[{"custom_tool_call": {"name": "draw", "input": ["a ", "cat"]}}]]},
        {"user": "what is this", "answers": ["A red dot."]},
        {"user": "slowly", "answers": [[{"text": ["first"]}, {"delay": 0.1}, {"text": [" last"]}]]},
        {"user": "short", "answers": [[{"text": "cut"}, {"finish": "length"}]]},
        {"user": "refuse", "answers": [[{"refusal": "Not that."}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"failure": {"message": "No.", "code": "server_error"}}]]},
    ],
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
SEALED = {"store": False, "include": ["reasoning.encrypted_content"]}

Make = Callable[..., ChatOpenAI]


class Profile(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"mild in {city}"


@custom_tool
def draw(text: str) -> str:
    """Draw a picture."""
    return f"drew {text}"


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve(SCRIPT)


@pytest.fixture
def connect() -> Iterator[Make]:
    """Return a function that makes chat models with an HTTP client of this test. LangChain never closes its own."""
    with openai.DefaultHttpxClient() as http:

        def make(server: Any, **options: Any) -> ChatOpenAI:
            return ChatOpenAI(
                **{"model": "scripted", "base_url": f"{server.url}/v1", "api_key": "any", "max_retries": 0} | options,
                use_responses_api=True,
                output_version="responses/v1",
                http_client=http,
            )

        yield make


def collect(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    return sum(rest, start=first)


def respond(model: Any, *history: BaseMessage, streamed: bool) -> AIMessage:
    messages = list(history)
    return collect(model.stream(messages)) if streamed else model.invoke(messages)


def answer(message: AIMessage) -> list[BaseMessage]:
    """Return the message and the outputs of its tool calls."""
    tools = {each.name: each for each in (get_weather, draw)}
    return [message, *(tools[call["name"]].invoke(call) for call in message.tool_calls)]


def kinds(message: AIMessage) -> list[str]:
    return [block["type"] for block in message.content]


def test_answer_has_id_usage_and_status(server: Any, connect: Make) -> None:
    message = connect(server).invoke([("system", "Be kind."), ("user", "hello there")])
    assert (message.text, kinds(message)) == ("You said: hello there", ["text"])
    assert (message.response_metadata["id"][:5], message.response_metadata["status"]) == ("resp_", "completed")
    usage = {name: message.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    assert usage == {"input_tokens": 4, "output_tokens": 4, "total_tokens": 8}


def test_stream_chunks_add_up_to_the_answer(server: Any, connect: Make) -> None:
    chunks = list(connect(server).stream("hello there"))
    texts = [chunk.text for chunk in chunks if chunk.text]
    whole = collect(iter(chunks))
    assert texts == ["You", " said:", " hello", " there"]
    assert (whole.text, kinds(whole), whole.usage_metadata["total_tokens"]) == ("".join(texts), ["text"], 6)
    assert whole.response_metadata["status"] == "completed"


async def test_asynchronous_methods_work(server: Any, connect: Make) -> None:
    async with openai.DefaultAsyncHttpxClient() as http:
        model = connect(server, http_async_client=http)
        texts = [chunk.text async for chunk in model.astream("hello there")]
        assert ("".join(texts), (await model.ainvoke("hello there")).text) == ("You said: hello there",) * 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", [{}, SEALED], ids=["stored", "sealed"])
def test_reasoning_is_sent_back_with_the_tool_output(
    server: Any, connect: Make, streamed: bool, options: dict[str, Any]
) -> None:
    model = connect(server, **options).bind_tools([get_weather])
    question = HumanMessage("weather")
    call = respond(model, question, streamed=streamed)
    assert kinds(call) == ["reasoning", "function_call"]
    assert [(each["name"], each["args"]) for each in call.tool_calls] == [("get_weather", {"city": "Bern"})]
    message = respond(model, question, *answer(call), streamed=streamed)
    assert message.text == "It is mild."
    assert [item["type"] for item in server.backend.input_items()[-1]] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]
    thought = server.backend.last_item("reasoning")
    assert thought["summary"] == [{"type": "summary_text", "text": "A tool knows."}]
    # From a stream, LangChain keeps only encrypted reasoning. The server finds stored reasoning by its id.
    assert thought["content"] == [{"type": "reasoning_text", "text": "Private reasoning."}]


@pytest.mark.parametrize("streamed", [False, True])
def test_custom_tool_is_called_with_text(server: Any, connect: Make, streamed: bool) -> None:
    model = connect(server).bind_tools([draw])
    question = HumanMessage("draw")
    call = respond(model, question, streamed=streamed)
    assert kinds(call) == ["custom_tool_call"]
    assert respond(model, question, *answer(call), streamed=streamed).text == "Here is a cat."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(server: Any, connect: Make, serve: Any, method: str) -> None:
    if method == "function_calling":
        call = {"name": "Profile", "arguments": {"name": "ada", "age": 36}}
        server = serve({"default": [{"tool_call": call}]})
    structured = connect(server).with_structured_output(Profile, method=method)
    assert structured.invoke("profile") == Profile(name="ada", age=36)
    *_, last = structured.stream("profile")
    assert last == Profile(name="ada", age=36)


def test_response_is_continued_by_its_id(server: Any, connect: Make) -> None:
    model = connect(server)
    first = model.invoke("my name is ada")
    again = model.invoke("recall", previous_response_id=first.response_metadata["id"])
    assert again.text == "Your name is ada."


def test_only_new_messages_of_a_history_are_sent(server: Any, connect: Make) -> None:
    model = connect(server, use_previous_response_id=True)
    history = [HumanMessage("my name is ada")]
    first = model.invoke(history)
    again = model.invoke([*history, first, HumanMessage("recall")])
    assert again.text == "Your name is ada."
    stored = server.client().responses.input_items.list(again.response_metadata["id"])
    assert [item.content[0].text for item in stored] == ["recall"]


def test_image_reaches_the_model(server: Any, connect: Make) -> None:
    content = [
        {"type": "text", "text": "what is this"},
        {"type": "image", "base64": PIXEL, "mime_type": "image/png"},
    ]
    assert connect(server).invoke([HumanMessage(content)]).text == "A red dot."
    _, image = server.backend.last_item("message")["content"]
    assert (image["type"], image["image_url"]) == ("input_image", f"data:image/png;base64,{PIXEL}")


@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_and_incomplete_answers_are_reported(server: Any, connect: Make, streamed: bool) -> None:
    refused = respond(connect(server), HumanMessage("refuse"), streamed=streamed)
    assert [(block["type"], block["refusal"]) for block in refused.content] == [("refusal", "Not that.")]
    short = respond(connect(server), HumanMessage("short"), streamed=streamed)
    assert (short.text, short.response_metadata["incomplete_details"]) == ("cut", {"reason": "max_output_tokens"})


def test_failing_model_raises_an_error(server: Any, connect: Make) -> None:
    model = connect(server)
    with pytest.raises(openai.APIError, match=r"No\."):
        list(model.stream("fail"))
    with pytest.raises(ValueError, match=r"No\."):
        model.invoke("fail")
    with pytest.raises(openai.NotFoundError, match="unknown"):
        model.invoke("hello", model="unknown")


def test_keepalive_events_are_ignored(serve: Any, connect: Make) -> None:
    server = serve(SCRIPT, keepalive_seconds=0.01)
    assert collect(connect(server).stream("slowly")).text == "first last"


def test_embedded_model_streams_calls_tools_and_fits_a_schema(embedded: Any, connect: Make) -> None:
    model = connect(embedded, model="smollm2-135m", temperature=0, max_tokens=40)
    assert "Paris" in collect(model.stream("What is the capital of France?")).text
    message = model.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
    assert [(call["name"], list(call["args"])) for call in message.tool_calls] == [("get_weather", ["city"])]
    assert isinstance(model.with_structured_output(Profile).invoke("Ada is 36 years old."), Profile)
