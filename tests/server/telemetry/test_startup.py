"""The variables that turn OpenTelemetry on, and exporters that fail."""

import logging
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from antiphon.agent import tracing
from antiphon.server.telemetry import server_telemetry
from antiphon.telemetry import export
from support.live_server import LiveServer

Serve = Callable[..., LiveServer]
BODY = {"model": "scripted", "input": "hi"}
CLOSED_PORT = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing._Switch, "is_decided", False)
    monkeypatch.setattr(tracing._Switch, "tracing", None)


def is_traced(server: LiveServer) -> bool:
    return server.engine._pipeline.telemetry is not None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED_PORT, "OTEL_SDK_DISABLED": "true"},
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED_PORT,
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
        },
    ],
)
def test_server_without_exporter_has_no_telemetry(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not is_traced(serve())


def test_missing_package_is_a_warning(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", CLOSED_PORT)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("antiphon.server.telemetry.server_")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("antiphon.engine.telemetry", "antiphon.telemetry.conventions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    server = serve()
    assert server.ask("POST", "/v1/responses", BODY).status == 200
    assert "pip install 'antiphon[otel]'" in caplog.text
    assert not is_traced(server)


@pytest.mark.parametrize("variable", ["OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"])
def test_unknown_exporter_is_a_warning(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setenv(variable, "carrier_pigeon")
    server = serve()
    assert server.ask("POST", "/v1/responses", BODY).status == 200
    assert f"{variable}: no exporter 'carrier_pigeon' is installed" in caplog.text
    assert not is_traced(server)


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_missing_exporter_of_grpc_is_a_warning_with_the_package(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, signal: str
) -> None:
    monkeypatch.setattr(export, "entry_points", lambda **_: ())
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", CLOSED_PORT)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    server = serve()
    assert server.ask("POST", "/v1/responses", BODY).status == 200
    (record,) = [record for record in caplog.records if record.name == server_telemetry.__name__]
    assert record.getMessage() == (
        f"OTEL_{signal.upper()}_EXPORTER: no exporter 'otlp_proto_grpc' is installed: "
        "pip install opentelemetry-exporter-otlp-proto-grpc, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf."
    )
    assert not is_traced(server)


@pytest.mark.parametrize("variable", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_invalid_variable_of_traces_is_a_warning(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", CLOSED_PORT)
    monkeypatch.setenv(variable, "-1")
    server = serve()
    assert server.ask("POST", "/v1/responses", BODY).status == 200
    assert "The OTEL_* variables of traces are not valid: " in caplog.text
    assert not is_traced(server)


def test_unknown_exporter_of_metrics_does_not_turn_off_traces(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "carrier_pigeon")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    server = serve()
    server.ask("GET", "/v1/models")
    server.stop()
    assert is_traced(server)
    assert "OTEL_METRICS_EXPORTER: no exporter 'carrier_pigeon' is installed" in caplog.text
    tracing.uninstrument()


def test_unreachable_collector_does_not_affect_requests(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", CLOSED_PORT)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setattr(server_telemetry, "CLOSE_SECONDS", 0.2)
    server = serve()
    assert is_traced(server)
    for _ in range(5):
        assert server.ask("POST", "/v1/responses", BODY).status == 200
    server.stop()
    # The exporter of the metrics is that of the SDK.
    names = [record.name for record in caplog.records]
    assert names.count("antiphon.telemetry.otlp.sender") <= 1
    assert names.count("opentelemetry.exporter.otlp.proto.http.metric_exporter") <= 1
    assert "could not be exported within 0.2 seconds" in caplog.text
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
    tracing.uninstrument()
