"""Export of spans to a receiver: the variables, retries, the bounded queue, and the end of the process."""

import logging
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import TracerProvider

from antiphon.errors import ConfigError
from antiphon.telemetry.export import find_provider
from antiphon.telemetry.otlp import sender
from antiphon.telemetry.otlp.provider import OtlpTracerProvider
from antiphon.telemetry.otlp.sender import parse_retry_after
from antiphon.telemetry.otlp.span import OtlpSpan
from support.otlp_receiver import OtlpReceiver, Reply

Receive = Callable[..., OtlpReceiver]
MakeProvider = Callable[[], OtlpTracerProvider]
CLOSED_PORT = "http://127.0.0.1:9"


def export(provider: OtlpTracerProvider, *names: str) -> bool:
    tracer = provider.get_tracer("test")
    for name in names:
        tracer.start_span(name).end()
    return provider.force_flush()


def test_variables_of_the_exporter_are_used(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret, x-tenant = one")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
    assert export(make_provider(), "one")
    ((path, headers, _),) = receiver.requests
    resource = receiver.find("one").resource
    assert (path, headers["content-encoding"], headers["content-type"]) == (
        "/v1/traces",
        "gzip",
        "application/x-protobuf",
    )
    assert (headers["authorization"], headers["x-tenant"]) == ("Bearer secret", "one")
    assert (resource["service.name"], resource["team"]) == ("mine", "blue")


def test_variables_for_traces_replace_the_general_ones(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", CLOSED_PORT)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/custom/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-kind=general")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-kind=traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "deflate")
    assert export(make_provider(), "one")
    ((path, headers, _),) = receiver.requests
    assert (path, headers["x-kind"], headers["content-encoding"]) == ("/custom/v1/traces", "traces", "deflate")
    assert receiver.find("one").parent_id == ""


def test_json_protocol_sends_json(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert export(make_provider(), "one")
    ((_, headers, body),) = receiver.requests
    assert headers["content-type"] == "application/json"
    assert b'"name":"one"' in body


def test_proxy_of_the_environment_is_used(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = receive()
    monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://ada:secret@"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.test:4318")
    assert export(make_provider(), "one")
    ((url, headers, _),) = proxy.requests
    assert url == "http://collector.test:4318/v1/traces"
    assert (headers["host"], headers["proxy-authorization"]) == ("collector.test:4318", "Basic YWRhOnNlY3JldA==")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_temporary_failure_is_repeated(receive: Receive, make_provider: MakeProvider, status: int) -> None:
    receiver = receive(Reply(status, {"Retry-After": "0"}), Reply(status, {"Retry-After": "0"}))
    assert export(make_provider(), "one")
    assert (len(receiver.requests), len(receiver.spans)) == (3, 1)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 500])
def test_final_failure_is_logged_and_not_repeated(
    receive: Receive, make_provider: MakeProvider, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    receiver = receive(Reply(status))
    provider = make_provider()
    assert not export(provider, "lost")
    assert export(provider, "next")
    assert [span.name for span in receiver.spans] == ["next"]
    assert f"spans could not be exported to {receiver.url}/v1/traces: status {status}" in caplog.text


def test_retry_after_beyond_the_timeout_is_a_failure(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    receiver = receive(Reply(503, {"Retry-After": "3600"}))
    assert not export(make_provider(), "one")
    assert len(receiver.requests) == 1


def test_wait_without_retry_after_grows(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []
    monkeypatch.setattr(sender, "_make_backoff", lambda attempt: attempts.append(attempt) or 0.0)
    receive(Reply(503), Reply(502), Reply(504))
    assert export(make_provider(), "one")
    assert attempts == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("-1", 0.0), ("", None), ("soon", None), ("inf", None), ("nan", None)],
)
def test_retry_after_is_parsed(text: str, seconds: float | None) -> None:
    assert parse_retry_after(text) == seconds


def test_retry_after_can_be_a_date() -> None:
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = parse_retry_after("Wed, 21 Oct 2099 07:28:00 GMT")
    assert later is not None
    assert later > 1e9


def test_unreachable_collector_is_one_log_line(
    make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:password@127.0.0.1:9/?token=secret")
    monkeypatch.setattr(sender, "_make_backoff", lambda _: 99.0)
    provider = make_provider()
    assert not export(provider, "one")
    assert not export(provider, "two")
    (record,) = [each for each in caplog.records if each.name == sender.__name__]
    assert "password" not in caplog.text
    assert "secret" not in caplog.text
    assert "http://127.0.0.1:9/" in record.getMessage()


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://ada:pass-1@[::1/v1/traces", "http://[::1/v1/traces"),
        ("ada:pass-1@127.0.0.1:9/v1/traces", "127.0.0.1:9/v1/traces"),
        ("http://ada:pass-1?@127.0.0.1:9/v1/traces", "***"),
        ("http://127.0.0.1:9/v1/traces?token=pass-1", "http://127.0.0.1:9/v1/traces"),
    ],
)
def test_password_of_a_malformed_endpoint_is_not_logged(
    endpoint: str,
    shown: str,
    make_provider: MakeProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    assert not export(make_provider(), "one")
    ((_, _, message),) = caplog.record_tuples
    assert message.startswith(f"spans could not be exported to {shown}: ")
    assert "pass-1" not in caplog.text


def test_malformed_header_is_not_logged(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = receive()
    headers = "x-one=1, api-key: secret-1 ,=secret-2,,x-plain=Basic a%20b==,x-two=a%20b==,X-Three="
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    assert export(make_provider(), "one")
    ((_, sent, _),) = receiver.requests
    assert {name: value for name, value in sent.items() if name.startswith("x-")} == {
        "x-one": "1",
        "x-plain": "Basic a%20b==",
        "x-two": "a b==",
        "x-three": "",
    }
    assert [message for _, _, message in caplog.record_tuples] == [
        f"OTEL_EXPORTER_OTLP_HEADERS: entry {number} is not name=value and is not sent" for number in (2, 3)
    ]


def test_span_ends_without_a_thread_for_its_export(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = receive()
    provider = make_provider()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        provider.get_tracer("test").start_span("one").end()
    assert [message for _, _, message in caplog.record_tuples] == [
        "the thread that exports spans could not be started: can't start new thread"
    ]
    provider.get_tracer("test").start_span("two").end()
    provider.shutdown()
    assert [receiver.find(name).name for name in ("one", "two")] == ["one", "two"]


def test_missing_certificate_is_named_in_the_log(
    make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/missing/ca.pem")
    assert not export(make_provider(), "one")
    assert "/missing/ca.pem" in caplog.text


def test_full_queue_drops_spans_with_one_log_line(
    make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    provider = make_provider()
    monkeypatch.setattr(provider.queue, "_start", lambda: None)  # no export
    tracer = provider.get_tracer("test")
    for number in range(10):
        tracer.start_span(str(number)).end()
    assert [span.name for _, span in provider.queue.records] == ["0", "1", "2"]
    (record,) = [each for each in caplog.records if "the queue is full" in each.getMessage()]
    assert record.levelno == logging.WARNING


def test_spans_that_were_added_without_a_check_are_dropped_with_the_next_one(
    make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    provider = make_provider()
    monkeypatch.setattr(provider.queue, "_start", lambda: None)  # no export
    tracer = provider.get_tracer("test")
    provider.queue.records.extend((None, tracer.start_span(str(number))) for number in range(5))
    tracer.start_span("last").end()
    assert [span.name for _, span in provider.queue.records] == ["0", "1", "2"]


def test_complete_batch_is_exported_at_once(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    receiver = receive()
    provider = make_provider()
    tracer = provider.get_tracer("test")
    for number in range(7):
        tracer.start_span(str(number)).end()
    provider.shutdown(30_000)
    assert [span.name for span in receiver.spans] == [str(number) for number in range(7)]
    assert len(receiver.requests) == 3


def test_delay_exports_an_incomplete_batch(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    receiver = receive()
    arrived = threading.Event()
    accept = receiver.receive

    def observe(path: str, body: bytes) -> None:
        accept(path, body)
        arrived.set()

    monkeypatch.setattr(receiver, "receive", observe)
    make_provider().get_tracer("test").start_span("one").end()
    assert arrived.wait(60)
    assert receiver.find("one").name == "one"


def test_shutdown_ends_a_wait_for_the_collector(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    receive(Reply(503, {"Retry-After": "3000"}))
    provider = make_provider()
    provider.get_tracer("test").start_span("one").end()
    provider.shutdown(1)
    thread = provider.queue._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_shutdown_closes_the_connection(receive: Receive, make_provider: MakeProvider) -> None:
    receiver = receive()
    provider = make_provider()
    assert export(provider, "one")
    assert not receiver.disconnected.is_set()
    provider.shutdown()
    assert receiver.disconnected.wait(60)


def test_span_after_shutdown_is_dropped(receive: Receive, make_provider: MakeProvider) -> None:
    receiver = receive()
    provider = make_provider()
    provider.shutdown()
    provider.shutdown()
    tracer = provider.get_tracer("test")
    provider.queue.records.append((None, tracer.start_span("added without a check")))
    tracer.start_span("late").end()
    assert provider.queue.records == []
    assert provider.force_flush()
    assert receiver.requests == []


def test_child_process_exports_its_own_spans_only(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receive()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    provider = make_provider()
    tracer = provider.get_tracer("test")
    tracer.start_span("of the parent").end()
    provider.queue.reset()  # as in the child after a fork
    assert export(provider, "of the child")
    assert [span.name for span in receiver.spans] == ["of the child"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_TRACES_SAMPLER", "dice"),
    ],
)
def test_invalid_variable_is_a_warning(
    receive: Receive,
    make_provider: MakeProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    receiver = receive()
    monkeypatch.setenv(variable, value)
    assert export(make_provider(), "one")
    assert f"{variable}: '{value}'" in caplog.text
    assert len(receiver.spans) == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_BSP_MAX_QUEUE_SIZE": "0"},
        {"OTEL_BSP_SCHEDULE_DELAY": "-1"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "10", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "11"},
        {"OTEL_SPAN_EVENT_COUNT_LIMIT": "many"},
    ],
)
def test_wrong_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="The OTEL_\\* variables of traces are not valid"):
        find_provider(shutdown_on_exit=False)


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "otlp,console"},
        {"OTEL_TRACES_EXPORTER": "otlp_proto_http"},
    ],
)
def test_other_exporters_use_the_sdk(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    provider = find_provider(shutdown_on_exit=False)
    assert isinstance(provider, TracerProvider)
    provider.shutdown()


def test_tracers_of_one_scope_are_the_same(make_provider: MakeProvider) -> None:
    provider = make_provider()
    first, second = provider.get_tracer("a", "1"), provider.get_tracer("a", "1")
    assert first is second
    assert first is not provider.get_tracer("a", "2")
    assert isinstance(first.start_span("one"), OtlpSpan)


def test_spans_of_many_threads_are_exported_once(
    receive: Receive, make_provider: MakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    receiver = receive()
    provider = make_provider()
    tracer = provider.get_tracer("test")
    names = [f"{thread} {number}" for thread in range(4) for number in range(100)]

    def record(thread: int) -> None:
        for number in range(100):
            tracer.start_span(f"{thread} {number}").end()

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    provider.shutdown(60_000)
    assert sorted(span.name for span in receiver.spans) == sorted(names)
