"""The metrics of a running server, parsed strictly."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.chat_completions.backend import create
from antiphon.config.loading import load
from antiphon.config.settings import ApiKey
from antiphon.errors import UpstreamError
from antiphon.protocol.response import Usage
from antiphon.server.metrics.server_metrics import MAX_MODELS
from antiphon.store.sqlite.store import SqliteStore
from antiphon.upstream.circuit_breaker import FAILURE_THRESHOLD
from antiphon.upstream.network_errors import Unreachable
from support.live_server import TIMEOUT, LiveServer, make_settings
from support.prometheus import Family, parse_metrics
from support.websocket_client import WebSocketClient

SCRIPT = {
    "models": ["scripted", 'odd "name"\\'],
    "slots": 1,
    "rules": [
        {"user": "wait", "answers": [[{"wait": "gate"}, {"text": "Late."}]]},
        {"user": "fail", "answers": [[{"failure": {"message": "No.", "code": "model_error"}}]]},
    ],
}
KEY = {"authorization": "Bearer sk-ada"}


def read(running: LiveServer, headers: dict[str, str] | None = None) -> dict[str, Family]:
    answer = running.ask("GET", "/metrics", headers=headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return parse_metrics(answer.body.decode())


def read_until(running: LiveServer, is_reached: Callable[[dict[str, Family]], bool]) -> dict[str, Family]:
    """Read the metrics until they show a state that the server is about to reach."""
    deadline = time.monotonic() + TIMEOUT
    while not is_reached(families := read(running)):
        assert time.monotonic() < deadline
    return families


@pytest.fixture
def measured(serve: Callable[..., LiveServer], tmp_path: Path) -> LiveServer:
    return serve(SCRIPT, metrics=True, store=SqliteStore(tmp_path / "store.db"))


def create_response(running: LiveServer, text: str, **fields: Any) -> None:
    running.ask("POST", "/v1/responses", {"model": "scripted", "input": text, **fields})


def test_metrics_are_off_by_default(server: LiveServer) -> None:
    answer = server.ask("GET", "/metrics")
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")


def test_environment_variables_turn_metrics_on() -> None:
    settings = load(None, {"ANTIPHON_METRICS": "1", "ANTIPHON_METRICS_KEY": "sk-m", "HOME": "/h"}, {})
    assert (settings.metrics, settings.metrics_key, "sk-m" in repr(settings)) == (True, "sk-m", False)


def test_requests_are_counted_by_route_method_and_status(measured: LiveServer) -> None:
    create_response(measured, "Hello")
    create_response(measured, "fail")
    measured.ask("GET", "/v1/responses/resp_1")
    measured.ask("GET", "/v1/responses/resp_2")
    measured.ask("DELETE", "/healthz")
    measured.ask("PROPFIND", "/nowhere/at/all")
    families = read(measured)
    counts = {tuple(labels.values()): value for _, labels, value in families["antiphon_http_requests_total"].samples}
    assert counts == {
        ("/v1/responses", "POST", "2xx"): 1,
        ("/v1/responses", "POST", "5xx"): 1,
        ("/v1/responses/{response_id}", "GET", "4xx"): 2,
        ("unknown", "DELETE", "4xx"): 1,
        ("unknown", "other", "4xx"): 1,
    }
    durations = families["antiphon_http_request_duration_seconds"]
    assert durations.get("_count", route="/v1/responses", method="POST") == 2


def test_responses_and_tokens_are_counted(measured: LiveServer) -> None:
    create_response(measured, "one two three")
    create_response(measured, "one two", model='odd "name"\\')
    create_response(measured, "fail")
    families = read(measured)
    statuses = families["antiphon_responses_total"]
    assert (statuses.get(status="completed"), statuses.get(status="failed")) == (2, 1)
    inputs, outputs = families["antiphon_input_tokens_total"], families["antiphon_output_tokens_total"]
    assert (inputs.get(model="scripted"), inputs.get(model='odd "name"\\')) == (3, 2)
    assert outputs.get(model="scripted") > 0


def test_background_response_is_counted(measured: LiveServer) -> None:
    client = measured.client()
    response = client.responses.create(model="scripted", input="one two", background=True)
    with client.responses.retrieve(response.id, stream=True) as events:
        assert [event.type for event in events][-1] == "response.completed"
    families = read_until(measured, lambda families: bool(families["antiphon_responses_total"].samples))
    assert families["antiphon_responses_total"].samples == [("", {"status": "completed"}, 1)]
    assert families["antiphon_input_tokens_total"].get(model="scripted") == 2
    # The reader of a background stream does not wait for a first token.
    assert families["antiphon_time_to_first_token_seconds"].get("_count") == 0


def test_tokens_are_counted_under_the_name_that_the_backend_has_for_the_model(serve: Callable[..., LiveServer]) -> None:
    running = serve(SCRIPT, metrics=True, models={"fast": ("scripted/scripted",)})
    for path in ("/v1/responses", "/v1/responses/compact"):
        assert running.ask("POST", path, {"model": "fast", "input": "Hello"}).status == 200
    samples = read(running)["antiphon_input_tokens_total"].samples
    assert [labels for _, labels, _ in samples] == [{"model": "scripted"}]


def test_first_token_is_measured_once_per_stream(measured: LiveServer) -> None:
    for text in ("Hello", "several words make several deltas", "fail"):
        create_response(measured, text, stream=True)
    create_response(measured, "not streamed")
    assert read(measured)["antiphon_time_to_first_token_seconds"].get("_count") == 2


def test_websocket_is_counted_without_its_duration(measured: LiveServer) -> None:
    with WebSocketClient(measured) as client:
        client.ask("one two")
    upgrade = {"route": "/v1/responses", "method": "GET", "status": "1xx"}
    families = read_until(
        measured, lambda families: ("", upgrade, 1) in families["antiphon_http_requests_total"].samples
    )
    assert families["antiphon_responses_total"].get(status="completed") == 1
    assert families["antiphon_input_tokens_total"].get(model="scripted") == 2
    routes = [labels["route"] for _, labels, _ in families["antiphon_http_request_duration_seconds"].samples]
    assert "/v1/responses" not in routes


def test_queue_and_responses_in_progress_are_read(measured: LiveServer) -> None:
    client = measured.client()
    running = [client.responses.create(model="scripted", input="wait", background=True) for _ in range(2)]
    measured.wait_for(lambda: measured.backend.reached("gate"))
    families = read_until(measured, lambda families: families["antiphon_queue_waiting"].get(backend="scripted") == 1)
    assert {
        name: families[name].samples
        for name in ("antiphon_queue_running", "antiphon_queue_waiting", "antiphon_responses_in_progress")
    } == {
        "antiphon_queue_running": [("", {"backend": "scripted"}, 1)],
        "antiphon_queue_waiting": [("", {"backend": "scripted"}, 1)],
        "antiphon_responses_in_progress": [("", {"kind": "foreground"}, 0), ("", {"kind": "background"}, 2)],
    }
    assert families["antiphon_background_waiting"].get() == 0
    for _ in running:
        measured.do(lambda: measured.backend.release("gate"))
    for response in running:
        with client.responses.retrieve(response.id, stream=True) as events:
            assert [event.type for event in events][-1] == "response.completed"


def test_store_writes_are_measured(measured: LiveServer) -> None:
    before = read(measured)["antiphon_store_write_duration_seconds"].get("_count")
    create_response(measured, "Hello")
    families = read(measured)
    assert families["antiphon_store_write_duration_seconds"].get("_count") > before
    assert families["antiphon_store_write_failures_total"].get() == 0


def test_number_of_model_labels_is_limited(measured: LiveServer) -> None:
    metrics = measured.engine._pipeline.observer
    assert metrics is not None
    for number in range(MAX_MODELS + 3):
        metrics.count_tokens(f"model-{number}", Usage(1, 2, 3))
    samples = read(measured)["antiphon_input_tokens_total"].samples
    assert len(samples) == MAX_MODELS + 1
    assert [value for _, labels, value in samples if labels["model"] == "other"] == [3]


@pytest.fixture
def with_upstream() -> Iterator[LiveServer]:
    upstream = create(
        "chat", {"base_url": "http://127.0.0.1:9/v1", "models": ["m"], "max_concurrent": 2}, Path("unused")
    )
    running = LiveServer(SCRIPT, make_settings(metrics=True), others={"chat": upstream})
    yield running
    running.stop()


def test_upstream_errors_and_breaker_state_are_read(with_upstream: LiveServer) -> None:
    upstream: Any = with_upstream.engine.backends["chat"]

    def break_connection() -> None:
        for number in range(FAILURE_THRESHOLD):
            upstream.upstream.count_error(Unreachable("x"))
            with pytest.raises(UpstreamError), upstream.upstream.circuit_breaker.guard("p") as guard:
                guard.request = b"%d" % number
                raise Unreachable("x")

    assert read(with_upstream)["antiphon_breaker_state"].get(backend="chat", state="closed") == 1
    with_upstream.do(break_connection)
    families = read(with_upstream)
    assert families["antiphon_upstream_errors_total"].samples == [
        ("", {"backend": "chat", "kind": "connection"}, FAILURE_THRESHOLD)
    ]
    assert families["antiphon_breaker_state"].samples == [
        ("", {"backend": "chat", "state": "closed"}, 0),
        ("", {"backend": "chat", "state": "half_open"}, 0),
        ("", {"backend": "chat", "state": "open"}, 1),
    ]
    assert families["antiphon_breaker_paused_projects"].samples == [("", {"backend": "chat"}, 0)]
    assert families["antiphon_queue_waiting"].get(backend="chat") == 0


def test_process_and_version_are_shown(measured: LiveServer) -> None:
    families = read(measured)
    assert families["process_cpu_seconds_total"].get() > 0
    assert families["process_resident_memory_bytes"].get() > 2**20
    assert families["process_start_time_seconds"].get() > 1.7e9
    ((_, labels, value),) = families["antiphon_build_info"].samples
    assert (set(labels), value) == ({"version", "python"}, 1)


def test_metrics_of_a_closed_store_omit_only_the_waiting_responses(measured: LiveServer) -> None:
    before = read(measured)
    measured.wait_for(measured.engine.close)
    families = read(measured)
    assert list(families) == list(before)
    assert families["antiphon_background_waiting"].samples == []


def test_head_of_metrics_has_no_body(measured: LiveServer) -> None:
    answer = measured.ask("HEAD", "/metrics")
    assert (answer.status, answer.body, int(answer.headers["content-length"]) > 1000) == (200, b"", True)


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"host": "evil.example"}, 403),
        ({}, {"origin": "http://evil.example"}, 403),
        ({"api_keys": (ApiKey("sk-ada"),)}, {}, 401),
        ({"api_keys": (ApiKey("sk-ada"),)}, KEY, 200),
        ({"api_keys": (ApiKey("sk-ada"),), "metrics_key": "sk-m"}, KEY, 401),
        ({"api_keys": (ApiKey("sk-ada"),), "metrics_key": "sk-m"}, {"authorization": "Bearer sk-m"}, 200),
        ({"metrics_key": "sk-m"}, {}, 401),
    ],
    ids=["open", "host", "origin", "no-key", "key", "project-key", "metrics-key", "no-metrics-key"],
)
def test_metrics_need_a_key(
    serve: Callable[..., LiveServer], settings: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    running = serve({}, metrics=True, **settings)
    assert running.ask("GET", "/metrics", headers=headers).status == status


def test_metrics_key_gives_no_access_to_models(serve: Callable[..., LiveServer]) -> None:
    running = serve({}, metrics=True, api_keys=(ApiKey("sk-ada"),), metrics_key="sk-m")
    assert running.ask("GET", "/v1/models", headers={"authorization": "Bearer sk-m"}).status == 401
