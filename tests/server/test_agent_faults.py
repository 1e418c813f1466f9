"""What goes wrong in a turn of an agent over HTTP, and the streams that tell of a turn."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from support.agent_client import PATH, TOOLS, AgentServer, read_events, results
from support.live_server import TIMEOUT, HttpResponse

Execute = Callable[..., HttpResponse]


@pytest.fixture(scope="module")
def target() -> Iterator[AgentServer]:
    server = AgentServer()
    yield server
    server.running.stop()


@pytest.fixture
def execute(target: AgentServer) -> Execute:
    return target.execute


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({}, 400, "invalid_request_error", "Instruction"),
        ({"Instruction": " "}, 400, "invalid_request_error", "Instruction"),
        ({"Instruction": 7}, 400, "invalid_request_error", "Instruction"),
        ({"Instruction": "x", "RagChunks": [{"Id": "1"}]}, 400, "invalid_request_error", "RagChunks[0].Path"),
        (
            {"Instruction": "x", "ConversationContext": {"Temperature": 3}},
            400,
            "invalid_request_error",
            "ConversationContext.Temperature",
        ),
        ({"Instruction": "x", "ConversationContext": {"ModelName": "no"}}, 404, "invalid_request_error", "model"),
        ({"Instruction": "x", "ToolsJson": '[{"name": "look_up"}]'}, 400, "invalid_request_error", "ToolsJson"),
        (
            {"Instruction": "x", "ResponseContinuationId": "resp_no"},
            400,
            "invalid_request_error",
            "ResponseContinuationId",
        ),
        ({"Instruction": "too much"}, 429, "rate_limit_error", None),
        ({"Instruction": "fail later"}, 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_an_error_is_an_envelope_with_its_status(
    execute: Execute, accept: str, body: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    answer = execute(accept=accept, ConversationId="conv_1", **body)
    if answer.headers["content-type"] == "text/event-stream":
        assert (body["Instruction"], answer.status) == ("fail later", 200)
        envelope = read_events(answer)[-1][1]
    else:
        assert answer.status == status
        envelope = answer.json
    raw = json.loads(envelope["RawResponseJson"])
    assert (envelope["Kind"], envelope["ErrorCode"], raw["error"].get("param")) == ("error", kind, param)
    assert envelope["ErrorMessage"] == raw["error"]["message"]


def test_a_body_that_is_no_json_is_an_envelope_too(target: AgentServer) -> None:
    headers = {"Authorization": "Bearer sk-ada"}
    for body in (b"{", b"[]", b'{"a":' * 5000, b"\xff"):
        answer = target.running.ask("POST", PATH, body, headers=headers)
        assert (answer.status, answer.json["Kind"]) == (400, "error")


def test_an_error_after_tools_have_run_says_what_they_came_to(execute: Execute) -> None:
    answer = execute(Instruction="then fail")
    made = answer.json
    (ran,) = made["ToolCalls"]
    assert (answer.status, made["Kind"], made["ErrorMessage"]) == (503, "error", "Hot.")
    assert (ran["CallId"], ran["WasExecuted"], ran["ResultJson"]) == ("call_1", True, '"mild"')
    second = execute(
        Instruction="go on",
        ResponseContinuationId=made["ResponseContinuationId"],
        ToolResultsJson=results(("call_1", ran["ResultJson"])),
    )
    assert (second.status, second.json["Kind"]) == (200, "ok")


@pytest.mark.parametrize("asked", [{"Stream": True}, {"accept": "text/event-stream"}])
def test_a_stream_tells_what_happens_and_ends_with_the_envelope(execute: Execute, asked: dict[str, Any]) -> None:
    *progress, result = read_events(execute(Instruction="define it", **asked))
    assert {name for name, _ in progress} == {"progress"}
    told = [event for _, event in progress]
    assert told == [
        {"Type": "turn.started", "Number": 1},
        {"Type": "text.delta", "Text": "Let"},
        {"Type": "text.delta", "Text": " me"},
        {"Type": "text.delta", "Text": " see."},
        {"Type": "turn.finished", "Number": 1},
        {"Type": "tool.started", "CallId": "call_1", "Name": "look_up", "ArgumentsJson": '{"word":"antiphon"}'},
        {"Type": "tool.finished", "CallId": "call_1", "Name": "look_up", "IsError": False},
        {"Type": "turn.started", "Number": 2},
        *({"Type": "text.delta", "Text": word} for word in ("It", " is", " a", " call", " and", " its", " answer.")),
        {"Type": "turn.finished", "Number": 2},
    ]
    assert (result[0], result[1]["Text"]) == ("result", "It is a call and its answer.")


def test_a_stream_tells_reasoning_too(execute: Execute) -> None:
    told = [event for _, event in read_events(execute(Instruction="think", Stream=True))[:-1]]
    assert [each for each in told if each["Type"].endswith("delta")] == [
        {"Type": "reasoning.delta", "Text": "Hm."},
        {"Type": "text.delta", "Text": "One"},
        {"Type": "text.delta", "Text": " two"},
    ]


def test_stream_false_and_a_client_that_takes_json_win_over_the_header(execute: Execute) -> None:
    for asked in ({"Stream": False, "accept": "text/event-stream"}, {"accept": "application/json, text/event-stream"}):
        answer = execute(Instruction="hello", **asked)
        assert answer.headers["content-type"] == "application/json"


def test_a_client_that_leaves_stops_the_model(serve: Any) -> None:
    running = serve({"default": [{"text": "One "}, {"wait": "never"}]})
    with running.connect() as connection:
        body = b'{"Instruction": "hello", "Stream": true}'
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body)
        )
        received = b""
        while b"text.delta" not in received:
            received += (came := connection.recv(65536))
            assert came, received
    running.wait_for(running.backend.cancellation.wait)


def test_a_silent_stream_gets_signs_of_life(serve: Any) -> None:
    running = serve({"default": [{"text": "One "}, {"wait": "gate"}, {"text": "two"}]}, keepalive_seconds=0.05)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    with closing(connection):
        connection.request("POST", PATH, json.dumps({"Instruction": "hello", "Stream": True}))
        told = []
        for line in connection.getresponse():
            told.append(line)
            if line == b"event: keepalive\n":
                running.do(lambda: running.backend.release("gate"))
    assert b"event: keepalive\n" in told
    assert json.loads(told[-2].removeprefix(b"data: "))["Text"] == "One two"


def test_arguments_that_are_nested_too_deeply_are_the_models_to_mend(serve: Any) -> None:
    made = {"tool_call": {"name": "look_up", "call_id": "call_1", "arguments": "[" * 100_000}}
    running = serve({"rules": [{"answers": [[made], "I see."]}]}, agent_tools=(TOOLS,))
    answer = running.ask("POST", PATH, {"Instruction": "hello"})
    assert (answer.status, answer.json["Kind"], answer.json["Text"]) == (200, "ok", "I see.")


@pytest.mark.parametrize("asked", [{"Stream": True}, {"Stream": False}])
def test_what_nobody_has_thought_of_is_an_envelope_too(serve: Any, asked: dict[str, Any]) -> None:
    running = serve({"default": [{"crash": "the power went out"}]})
    answer = running.ask("POST", PATH, {"Instruction": "hello", "ConversationId": "conv_1", **asked})
    made = answer.json
    assert (answer.status, made["Kind"], made["ErrorCode"], made["ConversationId"]) == (
        500,
        "error",
        "server_error",
        "conv_1",
    )
    assert "the power went out" not in answer.body.decode()
