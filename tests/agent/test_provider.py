"""S4: single turns with a model, over HTTP and in process. Each test names the contract lines that it covers."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from antiphon.agent.history import REASONING_LOST
from antiphon.agent.provider import Provider, ToolCall, Turn
from antiphon.agent.transports.base import Events, ResponseCollector, Transport
from antiphon.agent.transports.engine import LocalTransport
from antiphon.agent.transports.http import HttpTransport
from antiphon.errors import InvalidRequest, PreviousResponseNotFound, UnsupportedParameter
from antiphon.protocol import codec
from antiphon.store.memory.store import MemoryStore
from support.engine_harness import EngineHarness
from support.live_server import LiveServer, make_settings

SCRIPT: dict[str, Any] = {
    "rules": [
        {"last_item": "function_call_output", "answers": ["It is {history}."]},
        {
            "user": "weather",
            "answers": [
                [
                    {"text": "Looking. "},
                    {"tool_call": {"name": "look_up", "arguments": {"city": "Bern"}, "call_id": "call_a"}},
                    {"tool_call": {"name": "look_up", "arguments": {"city": "Rome"}, "call_id": "call_b", "key": 2}},
                ]
            ],
        },
    ],
    "default": "You said: {input}",
}
LOOK_UP = {"name": "look_up", "description": "The weather.", "parameters": {"type": "object", "properties": {}}}


class Recorder:
    """A transport that records requests and can simulate a server that loses responses."""

    def __init__(self, inner: Transport) -> None:
        self.sent: list[dict[str, Any]] = []
        self.refuse: Exception | None = None
        self.refusals: list[Exception] = []
        """Errors that the next requests raise, in order."""
        self._inner = inner

    async def stream(self, request: dict[str, Any]) -> Events:
        self.sent.append(request)
        if self.refuse is not None and "previous_response_id" in request:
            raise self.refuse
        if self.refusals:
            raise self.refusals.pop(0)
        return await self._inner.stream(request)

    async def close(self) -> None:
        await self._inner.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    running = LiveServer(SCRIPT, make_settings())
    yield running
    running.stop()


@pytest.fixture(params=["http", "in process"])
async def transport(request: pytest.FixtureRequest, server: LiveServer) -> AsyncIterator[Recorder]:
    if request.param == "http":
        recorder = Recorder(HttpTransport(f"{server.url}/v1/"))
        yield recorder
        await recorder.close()
        return
    harness = EngineHarness(SCRIPT, MemoryStore())
    await harness.engine.start()
    yield Recorder(LocalTransport(harness.engine))
    await harness.engine.close()


def make_provider(transport: Transport, **options: Any) -> Provider:
    return Provider(transport, model="scripted", **options)


async def test_s4_1_s4_4_s4_17_generate_response_returns_one_answer(transport: Recorder) -> None:
    assert await make_provider(transport).generate_response("Be kind.", "Hello") == "You said: Hello"
    assert transport.sent == [
        {
            "model": "scripted",
            "temperature": 0.7,
            "max_output_tokens": 10240,
            "instructions": "Be kind.",
            "input": "Hello",
            "store": True,
        }
    ]


async def test_s4_2_s4_3_s4_5_s4_6_s4_16_turn_with_calls_and_their_outputs(
    transport: Recorder,
) -> None:
    provider = make_provider(transport, carry_tools="never")
    first = await provider.generate_responses_turn(None, "weather", [LOOK_UP], None)
    assert first == Turn(
        "Looking. ",
        [ToolCall("call_a", "look_up", '{"city":"Bern"}'), ToolCall("call_b", "look_up", '{"city":"Rome"}')],
        first.response_id,
    )
    outputs = {"call_b": '{"celsius": 20}', "call_a": '{"celsius": 10}'}
    second = await provider.generate_responses_turn(first.response_id, None, None, outputs)
    assert (second.text, second.tool_calls) == ("It is 6.", [])
    started, continued = transport.sent
    assert started["input"] == "weather"
    assert started["tools"] == [{"type": "function", "strict": True} | LOOK_UP]
    assert started["store"] is continued["store"] is True
    assert "previous_response_id" not in started
    assert continued == {
        "model": "scripted",
        "temperature": 0.7,
        "max_output_tokens": 10240,
        "input": [
            {"type": "function_call_output", "call_id": "call_a", "output": '{"celsius": 10}'},
            {"type": "function_call_output", "call_id": "call_b", "output": '{"celsius": 20}'},
        ],
        "previous_response_id": first.response_id,
        "store": True,
    }


async def test_c4_tools_are_repeated_unless_turned_off(transport: Recorder) -> None:
    provider = make_provider(transport)
    first = await provider.generate_responses_turn(None, "weather", [LOOK_UP])
    await provider.generate_responses_turn(first.response_id, None, None, {"call_a": "1", "call_b": "2"})
    assert transport.sent[1]["tools"] == transport.sent[0]["tools"]


async def test_s4_7_structured_output_is_requested_as_in_the_api(transport: Recorder) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    await make_provider(transport, text_format=form).generate_response("x", "y")
    assert transport.sent[0]["text"] == {"format": form}


@pytest.mark.parametrize(
    "error",
    [
        PreviousResponseNotFound("gone", param="previous_response_id"),
        UnsupportedParameter("no state", param="previous_response_id"),
        UnsupportedParameter("no state"),
        InvalidRequest("It is not supported.", param="previous_response_id"),
        InvalidRequest("Response with id 'resp_1' not found.", param="response_id", code="404"),
    ],
)
async def test_s4_15_c6_stateless_server_gets_the_whole_history(transport: Recorder, error: Exception) -> None:
    provider = make_provider(transport)
    first = await provider.generate_responses_turn(None, "weather", [LOOK_UP])
    transport.refuse = error
    second = await provider.generate_responses_turn(first.response_id, None, None, {"call_a": "1", "call_b": "2"})
    assert second.text == "It is 6."
    assert provider.state == "client"
    replayed = transport.sent[-1]
    assert "previous_response_id" not in replayed
    assert (replayed["store"], replayed["include"]) == (False, ["reasoning.encrypted_content"])
    assert [item.get("type", item.get("role")) for item in replayed["input"]] == [
        "user",
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
    ]
    third = await provider.generate_responses_turn(second.response_id, "And now?")
    assert third.text == "You said: And now?"
    assert len(transport.sent[-1]["input"]) == 8


async def test_c6_unknown_history_cannot_be_sent(transport: Recorder) -> None:
    with pytest.raises(PreviousResponseNotFound):
        await make_provider(transport).generate_responses_turn("resp_unknown", "Go on.")
    with pytest.raises(PreviousResponseNotFound, match="is not known here"):
        await make_provider(transport, state="client").generate_responses_turn("resp_unknown", "Go on.")


async def test_c6_partial_history_is_not_sent(transport: Recorder) -> None:
    elsewhere, provider = make_provider(transport), make_provider(transport)
    first = await elsewhere.generate_responses_turn(None, "weather", [LOOK_UP])
    second = await provider.generate_responses_turn(first.response_id, None, None, {"call_a": "1", "call_b": "2"})
    transport.refuse = PreviousResponseNotFound("gone", param="previous_response_id")
    with pytest.raises(PreviousResponseNotFound):
        await provider.generate_responses_turn(second.response_id, "And now?")


async def test_client_state_always_sends_the_history(transport: Recorder) -> None:
    provider = make_provider(transport, state="client")
    first = await provider.generate_responses_turn(None, "weather", [LOOK_UP])
    await provider.generate_responses_turn(first.response_id, None, None, {"call_a": "1", "call_b": "2"})
    assert [request["store"] for request in transport.sent] == [False, False]
    assert all("previous_response_id" not in request for request in transport.sent)


async def test_encryption_refusal_repeats_the_request_and_is_remembered(transport: Recorder) -> None:
    provider = make_provider(transport, state="client")
    transport.refusals = [InvalidRequest("Encrypted content is not supported with this model.", param="include")]
    first = await provider.generate_responses_turn(None, "Hello")
    second = await provider.generate_responses_turn(first.response_id, "And now?")
    assert (first.text, second.text) == ("You said: Hello", "You said: And now?")
    assert [request.get("include") for request in transport.sent] == [["reasoning.encrypted_content"], None, None]


@pytest.mark.parametrize("state", ["client", "server"])
async def test_undecryptable_reasoning_is_dropped_with_a_notice(
    transport: Recorder, state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    provider = make_provider(transport, state=state)
    unreadable = InvalidRequest("It could not be verified.", code="invalid_encrypted_content")
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "old"}
    history = [{"role": "user", "content": "Hello"}, sealed, {"role": "assistant", "content": "Well."}]
    first = await provider.generate_responses_turn(None, [*history, {"role": "user", "content": "And?"}])
    transport.refusals = [unreadable] * (1 if state == "client" else 2)
    second = await provider.generate_responses_turn(first.response_id, "What?")
    third = await provider.generate_responses_turn(second.response_id, "So?")
    assert (second.text, third.text) == ("You said: What?", "You said: So?")
    assert [sealed in request["input"] for request in transport.sent[-3:]] == [True, False, False]
    assert caplog.messages == [REASONING_LOST]


async def test_decryption_error_without_history_is_raised(transport: Recorder) -> None:
    transport.refusals = [InvalidRequest("It could not be verified.", code="invalid_encrypted_content")]
    with pytest.raises(InvalidRequest, match="could not be verified"):
        await make_provider(transport, state="client").generate_responses_turn(None, "Hello")


async def test_continuation_without_input_is_rejected(transport: Recorder) -> None:
    provider = make_provider(transport)
    first = await provider.generate_responses_turn(None, "Hello")
    with pytest.raises(InvalidRequest, match="requires function outputs or input"):
        await provider.generate_responses_turn(first.response_id)


async def test_s4_14_the_path_follows_the_base_url(server: LiveServer) -> None:
    for base in (f"{server.url}/v1", f"{server.url}/v1/"):
        transport = HttpTransport(base)
        assert await make_provider(transport).generate_response("x", "hi") == "You said: hi"
        await transport.close()


def test_missing_response_id_and_fields_are_replaced() -> None:
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    stream = [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "temperature": None}},
    ]
    collector = ResponseCollector()
    collector.feed([codec.decode_event(json.dumps(event).encode()) for event in stream])
    assert collector.finish() == {"id": "resp_1", "status": "completed", "temperature": None, "output": [item]}


async def test_first_turn_without_input_is_rejected(transport: Recorder) -> None:
    with pytest.raises(InvalidRequest, match="The first turn requires input") as refused:
        await Provider(transport, model="scripted").generate_responses_turn()
    assert (refused.value.param, transport.sent) == ("user_input", [])
