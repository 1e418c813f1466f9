"""Errors and event streams of agent turns over HTTP."""

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
def test_agent_error_is_an_envelope_with_the_status(
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


def test_agent_invalid_json_is_an_envelope(target: AgentServer) -> None:
    headers = {"Authorization": "Bearer sk-ada"}
    for body in (b"{", b"[]", b'{"a":' * 5000, b"\xff"):
        answer = target.running.ask("POST", PATH, body, headers=headers)
        assert (answer.status, answer.json["Kind"]) == (400, "error")


def test_error_after_tools_ran_includes_their_results(execute: Execute) -> None:
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


@pytest.mark.parametrize("options", [{"Stream": True}, {"accept": "text/event-stream"}])
def test_agent_stream_reports_progress_and_ends_with_the_envelope(execute: Execute, options: dict[str, Any]) -> None:
    *progress, result = read_events(execute(Instruction="define it", **options))
    assert {name for name, _ in progress} == {"progress"}
    events = [event for _, event in progress]
    assert events == [
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


def test_agent_stream_includes_reasoning(execute: Execute) -> None:
    events = [event for _, event in read_events(execute(Instruction="think", Stream=True))[:-1]]
    assert [each for each in events if each["Type"].endswith("delta")] == [
        {"Type": "reasoning.delta", "Text": "Hm."},
        {"Type": "text.delta", "Text": "One"},
        {"Type": "text.delta", "Text": " two"},
    ]


def test_stream_false_or_accept_json_overrides_accept_event_stream(execute: Execute) -> None:
    for options in (
        {"Stream": False, "accept": "text/event-stream"},
        {"accept": "application/json, text/event-stream"},
    ):
        answer = execute(Instruction="hello", **options)
        assert answer.headers["content-type"] == "application/json"


def test_agent_client_disconnect_stops_the_model(serve: Any) -> None:
    running = serve({"default": [{"text": "One "}, {"wait": "never"}]})
    with running.connect() as connection:
        body = b'{"Instruction": "hello", "Stream": true}'
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body)
        )
        received = b""
        while b"text.delta" not in received:
            received += (came := connection.recv(65536))
            assert came, received
    running.wait_for(running.backend.cancellation.wait)


def test_idle_agent_stream_gets_keepalive_events(serve: Any) -> None:
    running = serve({"default": [{"text": "One "}, {"wait": "gate"}, {"text": "two"}]}, keepalive_seconds=0.05)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    with closing(connection):
        connection.request("POST", PATH, json.dumps({"Instruction": "hello", "Stream": True}))
        events = []
        for line in connection.getresponse():
            events.append(line)
            if line == b"event: keepalive\n":
                running.do(lambda: running.backend.release("gate"))
    assert b"event: keepalive\n" in events
    assert json.loads(events[-2].removeprefix(b"data: "))["Text"] == "One two"


def test_deeply_nested_arguments_are_returned_to_the_model(serve: Any) -> None:
    made = {"tool_call": {"name": "look_up", "call_id": "call_1", "arguments": "[" * 100_000}}
    running = serve({"rules": [{"answers": [[made], "I see."]}]}, agent_tools=(TOOLS,))
    answer = running.ask("POST", PATH, {"Instruction": "hello"})
    assert (answer.status, answer.json["Kind"], answer.json["Text"]) == (200, "ok", "I see.")


@pytest.mark.parametrize("options", [{"Stream": True}, {"Stream": False}])
def test_unexpected_error_is_an_envelope(serve: Any, options: dict[str, Any]) -> None:
    running = serve({"default": [{"crash": "the power went out"}]})
    answer = running.ask("POST", PATH, {"Instruction": "hello", "ConversationId": "conv_1", **options})
    made = answer.json
    assert (answer.status, made["Kind"], made["ErrorCode"], made["ConversationId"]) == (
        500,
        "error",
        "server_error",
        "conv_1",
    )
    assert "the power went out" not in answer.body.decode()
