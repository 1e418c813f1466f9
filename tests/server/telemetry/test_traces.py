"""Spans of a server, exported over OTLP to a receiver on the loopback interface."""

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry import trace

from antiphon import Agent
from antiphon.backends.chat_completions.backend import create as create_chat
from antiphon.config.settings import BackendSettings
from antiphon.server.log import JsonFormatter
from antiphon.server.telemetry.spans import RequestSpans
from antiphon.store.sqlite.store import SqliteStore
from antiphon.telemetry.conventions import MAX_CONTENT_BYTES
from antiphon.telemetry.current_context import NO_CONTEXT, CurrentSpan, read_context, set_context
from antiphon.telemetry.environment import CONTENT_VARIABLE
from antiphon.tools.hosted.registry import HostedTools
from support.hosted_harness import FILE_SEARCH, make_call, make_script
from support.hosted_tool import RecordingTool
from support.live_server import LiveServer, make_settings
from support.otlp_receiver import OtlpReceiver
from support.upstream_server import Reply, UpstreamServer, json_of, serve
from support.upstream_thread import ThreadedServer
from support.websocket_client import WebSocketClient

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
SERVER = "POST /v1/responses"
MODELS = json_of({"data": [{"id": "far"}]})

Serve = Callable[..., LiveServer]


def answer(text: str) -> Reply:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json_of({"id": "chatcmpl_1", "model": "far-2", "choices": choices, "usage": usage})


def call_file_search(call_id: str) -> Reply:
    function = {"name": "file_search", "arguments": '{"queries": ["one"]}'}
    message = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    return json_of({"model": "far-2", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})


@asynccontextmanager
async def serve_chat(*replies: Reply) -> AsyncIterator[UpstreamServer]:
    async with serve(list(replies), fixed={"/v1/models": MODELS}) as upstream:
        yield upstream


@pytest.fixture
def start() -> Iterator[Callable[..., LiveServer]]:
    """Start servers. `stop` exports their spans."""
    started: list[LiveServer] = []

    def make(script: dict[str, Any] | None = None, **options: Any) -> LiveServer:
        settings = make_settings(**options.pop("settings", {}))
        started.append(LiveServer(script or {}, settings, **options))
        return started[-1]

    yield make
    for running in started:
        running.stop()


def test_request_continues_the_trace_of_its_client(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    body = {"model": "scripted", "input": "hi", "temperature": 0.5, "max_output_tokens": 99}
    response = server.ask("POST", "/v1/responses", body, headers=TRACEPARENT | {"user-agent": "probe"})
    server.stop()
    assert receiver.list_parents() == [(SERVER, PARENT_ID), ("chat scripted", SERVER)]
    assert {span.trace_id for span in receiver.spans} == {TRACE_ID}
    assert receiver.find(SERVER).attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/responses",
        "http.response.status_code": 200,
        "url.path": "/v1/responses",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "user_agent.original": "probe",
        "antiphon.request.id": response.headers["x-request-id"],
        "antiphon.project": "default",
        "antiphon.response.id": response.json["id"],
    }
    assert receiver.find("chat scripted").attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "antiphon.scripted",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 99,
        "gen_ai.response.id": response.json["id"],
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": response.json["usage"]["input_tokens"],
        "gen_ai.usage.output_tokens": response.json["usage"]["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
    }


def test_streamed_model_call_has_the_time_to_its_first_chunk(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    list(server.client().responses.create(model="scripted", input="hi", stream=True))
    server.stop()
    assert receiver.find("chat scripted").attributes["gen_ai.response.time_to_first_chunk"] > 0


def test_agent_server_and_upstream_are_one_tree(receiver: OtlpReceiver, start: Serve) -> None:
    upstream = ThreadedServer(serve_chat(answer("Mild.")))
    chat = create_chat("chat", {"base_url": upstream.url}, make_settings().data_dir)
    server = start(others={"chat": chat}, settings={"models": {"mixed": ["chat/far"]}})
    outcome = Agent(model="mixed", base_url=f"{server.url}/v1").run_sync("How is it?")
    server.stop()
    (request,) = [each for each in upstream.server.requests if each.method == "POST"]
    upstream.close()
    assert outcome.text == "Mild."
    assert receiver.list_parents() == [
        (SERVER, "chat mixed"),
        ("chat far", SERVER),
        ("chat mixed", "invoke_agent agent"),
        ("invoke_agent agent", ""),
    ]
    inner = receiver.find("chat far")
    assert request.headers["traceparent"].startswith(f"00-{inner.trace_id}-{inner.span_id}-")
    expected = {
        "gen_ai.provider.name": "openai",
        "server.address": "127.0.0.1",
        "gen_ai.response.model": "far-2",
        "gen_ai.usage.input_tokens": 7,
    }
    assert expected.items() <= inner.attributes.items()


@pytest.mark.parametrize("headers", [{}, TRACEPARENT, TRACEPARENT | {"tracestate": "vendor=1"}])
def test_each_model_call_sends_its_own_span_to_the_upstream(
    receiver: OtlpReceiver, start: Serve, headers: dict[str, str]
) -> None:
    upstream = ThreadedServer(serve_chat(call_file_search("call_1"), call_file_search("call_2"), answer("Mild.")))
    chat = create_chat("chat", {"base_url": upstream.url}, make_settings().data_dir)
    tools = HostedTools([RecordingTool()])
    server = start(others={"chat": chat}, settings={"models": {"mixed": ["chat/far"]}}, hosted_tools=tools)
    body = {"model": "mixed", "input": "hi", "tools": [FILE_SEARCH]}
    assert server.ask("POST", "/v1/responses", body, headers=headers).json["status"] == "completed"
    server.stop()
    sent = [each.headers["traceparent"] for each in upstream.server.requests if each.method == "POST"]
    upstream.close()
    calls = [span for span in receiver.spans if span.name == "chat far"]
    assert [each[:-3] for each in sent] == [f"00-{span.trace_id}-{span.span_id}" for span in calls]
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans) == 6
    assert {span.parent_id for span in calls} == {receiver.find(SERVER).span_id}


def test_hosted_calls_have_spans_of_their_own(receiver: OtlpReceiver, start: Serve) -> None:
    script = make_script([make_call("one")], [make_call("fail", call_id="call_2")], "Done.")
    server = start(script, hosted_tools=HostedTools([RecordingTool()]))
    body = {"model": "scripted", "input": "hi", "tools": [FILE_SEARCH]}
    response = server.ask("POST", "/v1/responses", body)
    server.stop()
    assert receiver.list_parents() == [
        (SERVER, ""),
        ("chat scripted", SERVER),
        ("chat scripted", SERVER),
        ("chat scripted", SERVER),
        ("execute_tool file_search", SERVER),
        ("execute_tool file_search", SERVER),
    ]
    first = next(span for span in receiver.spans if span.name == "execute_tool file_search")
    assert first.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "file_search",
        "gen_ai.tool.call.id": "call_1",
        "gen_ai.tool.type": "datastore",
        "antiphon.tool.item_type": "file_search_call",
    }
    calls = [span.attributes for span in receiver.spans if span.name == "chat scripted"]
    assert [each["gen_ai.response.finish_reasons"] for each in calls] == [["tool_call"], ["tool_call"], ["stop"]]
    assert {each["gen_ai.response.id"] for each in calls} == {response.json["id"]}


def test_model_call_of_a_compaction_has_no_response_id(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    body = {"model": "scripted", "input": "hi"}
    assert server.ask("POST", "/v1/responses/compact", body).json["id"].startswith("compact_")
    server.stop()
    assert "gen_ai.response.id" not in receiver.find("chat scripted").attributes


def test_background_response_is_linked_to_its_request(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    body = {"model": "scripted", "input": "hi", "background": True, "stream": True}
    response = server.ask("POST", "/v1/responses", body, headers=TRACEPARENT)
    server.stop()
    assert b"response.completed" in response.body
    request, work = receiver.find(SERVER), receiver.find("background scripted")
    assert receiver.list_parents() == [
        (SERVER, PARENT_ID),
        ("background scripted", SERVER),
        ("chat scripted", "background scripted"),
    ]
    assert work.links == [(TRACE_ID, request.span_id)]
    assert work.attributes == {
        "antiphon.response.id": request.attributes["antiphon.response.id"],
        "antiphon.project": "default",
        "antiphon.attempt": 1,
        "antiphon.response.status": "completed",
    }


def test_run_that_another_node_takes_over_stays_in_its_trace(
    receiver: OtlpReceiver, start: Serve, tmp_path: Path
) -> None:
    script = {"default": [{"text": ["so", " far"]}, {"wait": "gate"}, {"text": [" and", " on"]}]}
    first = start(script, store=SqliteStore(tmp_path / "store.db"))
    body = {"model": "scripted", "input": "hi", "background": True}
    response_id = first.ask("POST", "/v1/responses", body, headers=TRACEPARENT).json["id"]
    first.wait_for(lambda: first.backend.reached("gate"))
    first.stop()
    second = start(script, store=SqliteStore(tmp_path / "store.db"))
    second.do(lambda: second.backend.release("gate"))
    assert b"response.completed" in second.ask("GET", f"/v1/responses/{response_id}?stream=true").body
    second.stop()
    request = receiver.find(SERVER)
    attempts = [span for span in receiver.spans if span.name == "background scripted"]
    assert [(span.trace_id, span.parent_id, span.links) for span in attempts] == [
        (TRACE_ID, request.span_id, [(TRACE_ID, request.span_id)])
    ] * 2
    assert [(span.attributes.get("error.type"), span.status) for span in attempts] == [("cancelled", ""), (None, "")]
    assert [span.attributes["antiphon.response.status"] for span in attempts[1:]] == ["completed"]
    calls = [span for span in receiver.spans if span.name == "chat scripted"]
    assert [span.parent_id for span in calls] == [span.span_id for span in attempts]
    assert [span.attributes["gen_ai.response.id"] for span in calls] == [response_id] * 2


def test_each_response_on_a_websocket_has_a_span(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    with WebSocketClient(server, headers=TRACEPARENT) as client:
        for _ in range(2):
            client.create()
            client.finish()
    server.stop()
    name = "websocket /v1/responses"
    assert receiver.list_parents() == [
        ("chat scripted", name),
        ("chat scripted", name),
        (name, PARENT_ID),
        (name, PARENT_ID),
    ]
    responses = [span.attributes["antiphon.response.id"] for span in receiver.spans if span.name == name]
    assert len(set(responses)) == 2


def test_failed_model_call_is_an_error_of_both_spans(receiver: OtlpReceiver, start: Serve) -> None:
    server = start({"default": [{"text": "So "}, {"failure": {"message": "No.", "code": "model_error"}}]})
    server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "stream": True})
    server.stop()
    assert [(span.name, span.status, span.attributes["error.type"]) for span in receiver.spans] == [
        ("chat scripted", "error", "model_error"),
        (SERVER, "error", "model_error"),
    ]
    assert receiver.find("chat scripted").attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_refused_request_is_no_error_of_the_server(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    server.ask("POST", "/v1/responses", {"model": "missing", "input": "hi"})
    server.ask("POST", "/v1/nothing", {})
    server.ask("DELETE", "/v1/responses")
    server.stop()
    results = [(span.name, span.status, span.attributes["error.type"]) for span in receiver.spans]
    assert results == [
        (SERVER, "", "model_not_found"),
        ("POST", "", "unknown_url"),
        ("DELETE", "", "method_not_allowed"),
    ]


def test_path_with_an_id_is_recorded_beside_its_route(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    for name in ("resp_1", "resp_2"):
        server.ask("GET", f"/v1/responses/{name}")
    server.stop()
    paths = [(span.name, span.attributes["http.route"], span.attributes["url.path"]) for span in receiver.spans]
    route = "/v1/responses/{response_id}"
    assert paths == [(f"GET {route}", route, f"/v1/responses/{name}") for name in ("resp_1", "resp_2")]


def test_probes_and_metrics_have_no_spans(receiver: OtlpReceiver, start: Serve) -> None:
    server = start(settings={"metrics": True})
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
        assert server.ask("GET", path).status == 200
    server.stop()
    assert [span.name for span in receiver.spans] == ["GET /v1/models"]


@pytest.mark.parametrize("state", [{}, {"tracestate": "vendor=1"}])
@pytest.mark.parametrize("sampler", ["", "always_off"])
def test_trace_that_is_not_sampled_only_reaches_the_upstream(
    receiver: OtlpReceiver, start: Serve, monkeypatch: pytest.MonkeyPatch, sampler: str, state: dict[str, str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    upstream = ThreadedServer(serve_chat(call_file_search("call_1"), answer("Mild.")))
    chat = create_chat("chat", {"base_url": upstream.url}, make_settings().data_dir)
    tools = HostedTools([RecordingTool()])
    server = start(others={"chat": chat}, settings={"models": {"mixed": ["chat/far"]}}, hosted_tools=tools)
    body = {"model": "mixed", "input": "hi", "tools": [FILE_SEARCH]}
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"} | state
    assert server.ask("POST", "/v1/responses", body, headers=headers).json["status"] == "completed"
    server.stop()
    sent = [each.headers for each in upstream.server.requests if each.method == "POST"]
    upstream.close()
    assert receiver.spans == []
    assert len(sent) == 2
    for each in sent:
        version, trace_id, span_id, flags = each["traceparent"].split("-")
        assert (version, trace_id, flags, each.get("tracestate")) == ("00", TRACE_ID, "00", state.get("tracestate"))
        assert span_id != PARENT_ID


def test_sampler_decides_about_a_whole_trace(
    receiver: OtlpReceiver, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    server = start()
    for first in ("7", "f"):  # the last 64 bits of the id decide
        trace_id = "0" * 15 + "1" + first + "0" * 15
        headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
        assert server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers=headers).status == 200
    server.stop()
    spans = [(span.name, span.trace_id) for span in receiver.spans]
    assert sorted(spans) == [(SERVER, "0" * 15 + "17" + "0" * 15), ("chat scripted", "0" * 15 + "17" + "0" * 15)]


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff" * 900])
def test_invalid_traceparent_begins_a_new_trace(receiver: OtlpReceiver, start: Serve, header: str) -> None:
    server = start()
    assert server.ask("GET", "/v1/models", headers={"traceparent": header}).status == 200
    server.stop()
    assert receiver.find("GET /v1/models").parent_id == ""


def test_content_is_recorded_only_if_requested(
    receiver: OtlpReceiver, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "scripted", "input": "secret question", "instructions": "secret rule"}
    for value in ("", "true"):
        monkeypatch.setenv(CONTENT_VARIABLE, value)
        server = start({"default": "secret answer"})
        server.ask("POST", "/v1/responses", body)
        server.stop()
    silent, full = [span.attributes for span in receiver.spans if span.name == "chat scripted"]
    assert "secret" not in json.dumps(silent)
    assert json.loads(full["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "secret question"}]}
    ]
    assert json.loads(full["gen_ai.system_instructions"]) == [{"type": "text", "content": "secret rule"}]
    assert json.loads(full["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "secret answer"}], "finish_reason": "stop"}
    ]


@contextmanager
def record_log(logger_name: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of a JSON log."""
    lines: list[dict[str, Any]] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    recorder, logger = Recorder(), logging.getLogger(logger_name)
    recorder.setFormatter(JsonFormatter())
    logger.addHandler(recorder)
    try:
        yield lines
    finally:
        logger.removeHandler(recorder)


def test_json_log_names_the_trace(receiver: OtlpReceiver, start: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    with record_log("antiphon.access") as lines:
        server = start()
        server.ask("GET", "/v1/models", headers=TRACEPARENT)
        server.ask("GET", "/healthz")
        server.stop()
    span = receiver.find("GET /v1/models")
    traced, untraced = lines
    assert (traced["trace_id"], traced["span_id"]) == (TRACE_ID, span.span_id)
    assert "trace_id" not in untraced


def test_json_log_of_a_model_call_names_its_span(receiver: OtlpReceiver, start: Serve) -> None:
    upstream = ThreadedServer(serve_chat(json_of({}, 503, retry_after_ms="1"), answer("Mild.")))
    chat = create_chat("chat", {"base_url": upstream.url}, make_settings().data_dir)
    server = start(others={"chat": chat}, settings={"models": {"mixed": ["chat/far"]}})
    with record_log("antiphon.upstream.client") as lines:
        assert server.ask("POST", "/v1/responses", {"model": "mixed", "input": "hi"}).status == 200
    server.stop()
    upstream.close()
    span = receiver.find("chat far")
    assert [(line["trace_id"], line["span_id"]) for line in lines] == [(span.trace_id, span.span_id)]


def test_backend_of_new_settings_is_traced_too(receiver: OtlpReceiver, start: Serve) -> None:
    server = start()
    script = {"models": ["other"]}
    backends = {"new": BackendSettings(kind="scripted", options={"script": script})}
    settings = msgspec.structs.replace(server.server.settings, backends=backends)
    server.wait_for(lambda: server.server.apply_settings(settings))
    assert server.ask("POST", "/v1/responses", {"model": "other", "input": "hi"}).status == 200
    server.stop()
    assert receiver.list_parents() == [(SERVER, ""), ("chat other", SERVER)]


def test_long_name_of_a_model_is_cut(receiver: OtlpReceiver, start: Serve) -> None:
    upstream = ThreadedServer(serve_chat(answer("Mild.")))
    chat = create_chat("chat", {"base_url": upstream.url}, make_settings().data_dir)
    server = start(others={"chat": chat}, settings={"models": {"mixed": [f"chat/{'m' * 300}"]}})
    assert server.ask("POST", "/v1/responses", {"model": "mixed", "input": "hi"}).status == 200
    server.stop()
    upstream.close()
    assert receiver.find(f"chat {'m' * 256}").attributes["gen_ai.request.model"] == "m" * 256


def test_large_content_is_replaced_by_its_size(
    receiver: OtlpReceiver, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTENT_VARIABLE, "true")
    server = start({"default": "x" * (MAX_CONTENT_BYTES + 1)})
    server.ask("POST", "/v1/responses", {"model": "scripted", "input": "y" * (MAX_CONTENT_BYTES + 1)})
    server.stop()
    attributes = receiver.find("chat scripted").attributes
    assert attributes["gen_ai.output.messages"] == f'"omitted: {MAX_CONTENT_BYTES + 1} bytes"'
    assert attributes["gen_ai.input.messages"].startswith('"omitted: ')


def test_result_of_a_hosted_call_is_recorded_only_if_requested(
    receiver: OtlpReceiver, start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "true"):
        monkeypatch.setenv(CONTENT_VARIABLE, value)
        server = start(make_script([make_call("secret")], "Done."), hosted_tools=HostedTools([RecordingTool()]))
        server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "tools": [FILE_SEARCH]})
        server.stop()
    silent, full = [span.attributes for span in receiver.spans if span.name == "execute_tool file_search"]
    assert "secret" not in json.dumps(silent)
    assert json.loads(full["gen_ai.tool.call.arguments"]) == {"queries": ["secret"]}
    assert json.loads(full["gen_ai.tool.call.result"])["queries"] == ["secret"]


def test_caller_of_the_application_keeps_its_context() -> None:
    spans = RequestSpans(trace.NoOpTracer())
    with CurrentSpan(trace.INVALID_SPAN):
        before = read_context()
        with spans.keep_context():
            set_context(NO_CONTEXT)
        assert read_context() is before
