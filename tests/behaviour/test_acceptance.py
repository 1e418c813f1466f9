"""The HTTP cases of the acceptance suite of Open Responses, validated with its OpenAPI document.

The suite's WebSocket cases are in tests/server, with the rest of that transport.
"""

import http.client
import json
from collections.abc import Callable
from typing import Any

from support import openresponses
from support.live_server import TIMEOUT, HttpResponse, LiveServer

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


def ask(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/responses", {"model": "scripted"} | body)
    assert answer.status == 200, answer.body
    openresponses.validate_response(answer.json)
    assert answer.json["status"] == "completed"
    response: dict[str, Any] = answer.json
    return response


def read_events(answer: HttpResponse) -> list[dict[str, Any]]:
    return parse_events(answer.body)


def parse_events(body: bytes) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    events = [json.loads(line) for line in data[:-1]]
    for event in events:
        openresponses.validate_event(event)
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_basic_response_is_complete(server: LiveServer) -> None:
    response = ask(server, input=[{"type": "message", "role": "user", "content": "Say hello in three words."}])
    assert text_of(response)
    assert response["output"][0]["role"] == "assistant"


def test_streamed_response_has_valid_events(server: LiveServer) -> None:
    body = {"model": "scripted", "input": "Count to five.", "stream": True}
    events = read_events(server.ask("POST", "/v1/responses", body))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == text_of(events[-1]["response"]) != ""


def test_delayed_first_token_adds_no_event(serve: Callable[..., LiveServer]) -> None:
    script = {"default": [{"wait": "gate"}, {"reasoning": "Hm."}, {"text": "Hello."}]}
    running = serve(script, keepalive_seconds=0.02, opening_seconds=0, compat="open-responses")
    body = {"model": "scripted", "input": "hi", "stream": True, "text": {"format": SCHEMA}}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    connection.request("POST", "/v1/responses", json.dumps(body))
    response = connection.getresponse()
    received = b""
    while received.count(b"\n: keepalive\n") < 3:
        received += response.read1()
    running.do(lambda: running.backend.release("gate"))
    received += response.read()
    connection.close()
    events = parse_events(received)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    openresponses.validate_response(events[-1]["response"])


def test_system_prompt_is_accepted_as_message_and_instructions(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Talk like a pirate."}, {"role": "user", "content": "Say hello."}]
    assert text_of(ask(server, input=messages))
    assert ask(server, input="Say hello.", instructions="Talk like a pirate.")["instructions"] == "Talk like a pirate."


def test_tool_is_called_and_its_output_accepted(server: LiveServer) -> None:
    response = ask(server, input="call", tools=[WEATHER])
    call = next(item for item in response["output"] if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"celsius": 18}'}
    after = ask(server, input=[{"role": "user", "content": "call"}, call, output], tools=[WEATHER])
    assert after["output"]


def test_image_input_is_accepted(server: LiveServer) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}]
    assert text_of(ask(server, input=[{"role": "user", "content": parts}]))


def test_conversation_of_several_turns_is_accepted(server: LiveServer) -> None:
    turns = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "Who am I?"},
    ]
    assert text_of(ask(server, input=turns))
    first = ask(server, input="My name is Ada.")
    assert ask(server, input="Who am I?", previous_response_id=first["id"])["previous_response_id"] == first["id"]


def test_phase_of_an_assistant_message_is_stored(server: LiveServer) -> None:
    turns = [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "I am looking.", "phase": "commentary"},
        {"role": "assistant", "content": "Here it is.", "phase": "final_answer"},
        {"role": "user", "content": "Thanks."},
    ]
    response = ask(server, input=turns)
    stored = server.ask("GET", f"/v1/responses/{response['id']}/input_items?order=asc").json["data"]
    assert [item.get("phase") for item in stored] == [None, "commentary", "final_answer", None]
    assert not any("phase" in item for item in response["output"])


def test_compacted_conversation_can_be_continued(server: LiveServer) -> None:
    turns = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "I live in Bern."},
    ]
    answer = server.ask("POST", "/v1/responses/compact", {"model": "scripted", "input": turns})
    assert answer.status == 200
    openresponses.validate_compaction(answer.json)
    window = answer.json["output"]
    assert [item["type"] for item in window].count("compaction") == 1
    assert text_of(ask(server, input=[*window, {"role": "user", "content": "Where do I live?"}]))


def test_compact_requires_a_model(server: LiveServer) -> None:
    answer = server.ask("POST", "/v1/responses/compact", {"input": "hi"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")
