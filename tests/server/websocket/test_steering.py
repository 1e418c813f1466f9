from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.server.websocket import connection
from support.live_server import LiveServer
from support.websocket_client import WebSocketClient, get_text

CALL = {"tool_call": {"name": "get_weather", "arguments": {"city": "Bern"}}}
SCRIPT = {
    "rules": [
        {"user": "slowly", "answers": [[{"text": "One "}, {"wait": "gate"}, {"text": "two."}]]},
        {"user": "think", "answers": [[{"reasoning": "Hm"}, {"wait": "gate"}, {"text": "two."}]]},
        {"user": "call", "answers": [[{"text": "So "}, CALL, {"wait": "gate"}]]},
        {"user": "fail", "answers": [[{"text": "So "}, {"wait": "gate"}, {"failure": {"message": "No."}}]]},
        {"user": "bad", "answers": [[{"raise": {"message": "Too hot.", "status": 400, "code": "too_hot"}}]]},
    ],
    "default": "{history} {input}",
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def running(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve(SCRIPT)


@pytest.fixture
def client(running: LiveServer) -> Iterator[WebSocketClient]:
    with WebSocketClient(running) as client:
        yield client


def start_response(running: LiveServer, client: WebSocketClient, text: str = "slowly", **options: Any) -> str:
    """Create a response whose model waits at a gate, and return its id."""
    client.create(text, **options)
    response_id: str = client.until("response.created", options.get("stream_id"))["response"]["id"]
    running.wait_for(lambda: running.backend.reached("gate"))
    return response_id


def release(running: LiveServer) -> None:
    running.do(lambda: running.backend.release("gate"))


def fail(client: WebSocketClient, *arguments: Any, **options: Any) -> dict[str, Any]:
    client.steer(*arguments, **options)
    return client.until("response.steer.failed")


@pytest.mark.parametrize("options", [{}, {"store": False}, {"store": False, "stream_id": "a"}])
def test_steered_response_ends_and_a_successor_answers(
    running: LiveServer, client: WebSocketClient, options: dict[str, Any]
) -> None:
    lane = options.get("stream_id")
    response_id = start_response(
        running, client, instructions="Be brief.", temperature=0.5, tools=[FUNCTION], **options
    )
    client.steer(response_id, "turn left")
    accepted = client.until("response.steer.accepted", lane)
    steered = client.finish(lane)
    numbers = [event["sequence_number"] for event in (accepted, *steered)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert accepted["steer"]["previous_response_id"] == response_id
    assert steered[-1]["type"] == "response.incomplete"
    ended = steered[-1]["response"]
    assert (ended["incomplete_details"], get_text(ended)) == ({"reason": "steered"}, "One ")
    successor = client.finish(lane)[-1]["response"]
    assert (successor["status"], get_text(successor)) == ("completed", "3 turn left")
    same = ("model", "instructions", "temperature", "tools", "store")
    assert [successor[name] for name in same] == [ended[name] for name in same]
    assert successor["previous_response_id"] == response_id
    assert (running.backend.cancelled, get_text(client.ask(previous_response_id=successor["id"]))) == (1, "5 hi")


def test_successor_runs_before_waiting_requests(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client)
    client.create("wait")
    client.steer(response_id)
    assert [get_text(client.finish()[-1]["response"]) for _ in range(3)] == ["One ", "3 turn left", "1 wait"]


def test_successor_can_be_steered_again(running: LiveServer, client: WebSocketClient) -> None:
    first = start_response(running, client)
    client.steer(first, "slowly please")
    client.finish()
    second = client.until("response.created")["response"]["id"]
    running.wait_for(lambda: running.backend.reached("gate"))
    client.steer(second)
    client.finish()
    assert get_text(client.finish()[-1]["response"]) == "5 turn left"


def test_successor_works_after_interrupted_reasoning(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "think", store=False)
    client.steer(response_id)
    assert client.finish()[-1]["response"]["output"][0]["type"] == "reasoning"
    assert get_text(client.finish()[-1]["response"]) == "2 turn left"


def test_steering_input_waits_for_the_tool_call_output(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "call", tools=[FUNCTION], store=False, stream_id="a")
    client.steer(response_id, "turn left")
    client.steer(response_id, [{"role": "user", "content": [{"type": "input_text", "text": "and stop"}]}])
    accepted = [client.until("response.steer.accepted", "a")["steer"] for _ in range(2)]
    release(running)
    completed = client.finish("a")[-1]
    call = completed["response"]["output"][-1]
    assert (completed["type"], call["type"]) == ("response.completed", "function_call")
    pending = [client.next("a") for _ in range(2)]
    assert pending[0] == {
        "type": "response.steer.pending",
        "sequence_number": completed["sequence_number"] + 1,
        "steer": accepted[0],
        "required_input": [{"type": "function_call_output", "call_id": call["call_id"], "name": "get_weather"}],
        "reason": "waiting_for_required_input",
        "stream_id": "a",
    }
    assert pending[1]["steer"] == accepted[1]
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
    client.create(output, previous_response_id=response_id, stream_id="a")
    made = client.finish("a")[-1]["response"]
    # the question, a message, the call; then the steering input, and the output
    assert get_text(made) == "6 and stop"
    items = running.ask("GET", f"/v1/responses/{made['id']}/input_items?order=asc").json["data"]
    assert [item["type"] for item in items] == ["message", "message", "function_call_output"]
    assert client.ask(store=False, stream_id="a")["status"] == "completed"


def test_pending_steering_input_joins_the_outputs_on_any_lane(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "call", tools=[FUNCTION], store=False, stream_id="a")
    client.steer(response_id, "turn left")
    release(running)
    [required] = client.until("response.steer.pending", "a")["required_input"]
    output = [{"type": "function_call_output", "call_id": required["call_id"], "output": "rain"}]
    made = client.ask(output, stream_id="b", previous_response_id=response_id, store=False)
    assert get_text(made) == "5 turn left"


def test_continuation_on_another_lane_waits_for_steering_input(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "call", tools=[FUNCTION], store=False, stream_id="a")
    call = client.until("response.output_item.added", "a")["item"]
    while call["type"] != "function_call":
        call = client.until("response.output_item.added", "a")["item"]
    client.steer(response_id, "turn left")
    client.until("response.steer.accepted", "a")
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}]
    client.create(output, stream_id="b", previous_response_id=response_id, store=False)
    client.send({"type": "nothing"})
    assert client.next()["status"] == 400  # so the messages before it have been read
    release(running)
    assert get_text(client.finish("b")[-1]["response"]) == "5 turn left"


def test_pending_input_is_returned_when_its_continuation_fails(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "call", tools=[FUNCTION], store=False)
    client.steer(response_id, "turn left")
    accepted = client.until("response.steer.accepted")["steer"]
    release(running)
    client.until("response.steer.pending")
    assert client.refuse("no output", previous_response_id=response_id)["status"] == 400
    failed = client.next()
    assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", "successor_creation_failed")
    assert failed["steer"] == {**accepted, "input": "turn left"}


def test_input_is_returned_when_no_successor_can_be_created(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, stream_id="a")
    client.steer(response_id, "bad")
    accepted = client.until("response.steer.accepted", "a")["steer"]
    assert client.finish("a")[-1]["type"] == "response.incomplete"
    assert client.next("a") == {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {
            "code": "successor_creation_failed",
            "message": "The continuation with this input could not be created: Too hot.",
            "type": "invalid_request_error",
        },
        "steer": {**accepted, "input": "bad"},
        "stream_id": "a",
    }


def test_input_is_returned_when_the_response_fails(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "call", tools=[FUNCTION])
    client.steer(response_id)
    client.until("response.steer.accepted")
    running.do(running.engine.stop_runs)
    assert client.finish()[-1]["type"] == "response.failed"
    assert client.next()["error"]["code"] == "response_not_active"


def test_steering_does_not_affect_other_lanes(running: LiveServer, client: WebSocketClient) -> None:
    steered = start_response(running, client, stream_id="a")
    start_response(running, client, stream_id="b")
    client.steer(steered)
    assert client.finish("a")[-1]["type"] == "response.incomplete"
    release(running)
    assert get_text(client.finish("b")[-1]["response"]) == "One two."


def test_unknown_response_cannot_be_steered(running: LiveServer, client: WebSocketClient) -> None:
    with WebSocketClient(running) as other:
        elsewhere = start_response(running, other)
        for response_id in ("resp_1", elsewhere):
            assert fail(client, response_id, "kept") == {
                "type": "response.steer.failed",
                "sequence_number": 0,
                "error": {
                    "code": "response_not_found",
                    "message": f"No response with id '{response_id}' on this connection.",
                    "type": "invalid_request_error",
                },
                "steer": {"previous_response_id": response_id, "input": "kept"},
            }


def test_ended_response_cannot_be_steered(client: WebSocketClient) -> None:
    assert fail(client, client.ask()["id"])["error"]["code"] == "response_already_completed"


def test_failed_response_cannot_be_steered(running: LiveServer, client: WebSocketClient) -> None:
    response_id = start_response(running, client, "fail")
    release(running)
    assert client.finish()[-1]["type"] == "response.failed"
    assert fail(client, response_id)["error"]["code"] == "response_not_active"


@pytest.mark.parametrize(
    "given",
    [
        [],
        None,
        7,
        [{"role": "developer", "content": "x"}],
        [{"type": "function_call_output", "call_id": "x", "output": "y"}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "mp3"}}]}],
    ],
)
def test_only_user_messages_can_steer(running: LiveServer, client: WebSocketClient, given: Any) -> None:
    response_id = start_response(running, client)
    failed = fail(client, response_id, given)
    assert (failed["error"]["code"], failed["steer"]) == (
        "invalid_input",
        {"previous_response_id": response_id, "input": given},
    )
    assert fail(client, response_id, stream_id="a")["error"]["message"] == (
        "'stream_id' is not a field of a steering message."
    )


def test_steering_message_without_target_or_input_is_an_error(client: WebSocketClient) -> None:
    for message in ({"input": "x"}, {"previous_response_id": "resp_1"}):
        client.send({"type": "response.steer", **message})
    assert [client.next()["error"]["param"] for _ in range(2)] == ["previous_response_id", "input"]


def test_response_of_a_conversation_cannot_be_steered(running: LiveServer, client: WebSocketClient) -> None:
    conversation = running.ask("POST", "/v1/conversations", {}).json["id"]
    response_id = start_response(running, client, conversation=conversation)
    assert fail(client, response_id)["error"]["code"] == "steering_not_supported"


def test_number_of_steering_messages_is_limited(
    running: LiveServer, client: WebSocketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_STEERS", 1)
    response_id = start_response(running, client, "call", tools=[FUNCTION])
    client.steer(response_id)
    client.until("response.steer.accepted")
    assert fail(client, response_id)["error"]["code"] == "too_many_pending_steers"
