"""Metrics of model calls over OTLP."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from antiphon.protocol.response import Usage
from antiphon.server.metrics.server_metrics import MAX_MODELS
from antiphon.server.telemetry.metrics import MetricExport, ModelMetrics
from support.live_server import LiveServer
from support.otlp_receiver import OtlpReceiver

DURATION = "gen_ai.client.operation.duration"
FIRST_CHUNK = "gen_ai.client.operation.time_to_first_chunk"
TOKENS = "gen_ai.client.token.usage"

USAGE = Usage(30, 5, 35)

Serve = Callable[..., LiveServer]


class Exports:
    """An exporter that counts the values of each export."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []
        self.spans_of_time: list[tuple[int, int]] = []
        self.is_shut_down = False

    def export(self, data: Any, timeout_millis: float) -> None:
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        self.counts.append({each.name: sum(point.count for point in each.data.data_points) for each in metrics})
        point = metrics[0].data.data_points[0]
        self.spans_of_time.append((point.start_time_unix_nano, point.time_unix_nano))

    def shutdown(self) -> None:
        self.is_shut_down = True


def record_call(
    metrics: ModelMetrics,
    *,
    model: str = "small",
    error: str = "",
    first_chunk: float | None = 0.1,
    usage: Usage | None = USAGE,
) -> None:
    metrics.record_call(("openai", model, model, "", "", error), 0.5, first_chunk, usage)


def test_model_calls_are_exported_as_metrics(
    receiver: OtlpReceiver, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    failing = {"user": "fail", "answers": [[{"failure": {"message": "No.", "code": "model_error"}}]]}
    server = serve({"rules": [failing]})
    whole = server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}).json["usage"]
    server.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi", "stream": True})
    server.ask("POST", "/v1/responses", {"model": "scripted", "input": "fail"})
    server.stop()
    labels = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "antiphon.scripted",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
    }
    found = {(point.name, point.unit, point.count, tuple(point.attributes.items())) for point in receiver.points}
    assert found == {
        (DURATION, "s", 2, tuple(labels.items())),
        (DURATION, "s", 1, tuple((labels | {"error.type": "model_error"}).items())),
        (FIRST_CHUNK, "s", 1, tuple(labels.items())),
        (TOKENS, "{token}", 2, tuple((labels | {"gen_ai.token.type": "input"}).items())),
        (TOKENS, "{token}", 2, tuple((labels | {"gen_ai.token.type": "output"}).items())),
    }
    sums = {point.attributes["gen_ai.token.type"]: point.sum for point in receiver.points if point.name == TOKENS}
    assert sums == {"input": 2 * whole["input_tokens"], "output": 2 * whole["output_tokens"]}
    assert all(sum(point.counts) == point.count for point in receiver.points)
    assert all(len(point.counts) == len(point.bounds) + 1 for point in receiver.points)
    assert receiver.spans == []


@pytest.mark.parametrize(("preference", "counts"), [("cumulative", [1, 3]), ("delta", [1, 2])])
def test_temporality_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, preference: str, counts: list[int]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)
    metrics, exports = ModelMetrics(), Exports()
    export = MetricExport(metrics, [exports], None)
    record_call(metrics)
    export.export()
    record_call(metrics)
    record_call(metrics)
    export.export()
    assert [each[DURATION] for each in exports.counts] == counts
    (first, second) = exports.spans_of_time
    assert second[0] == (first[1] if preference == "delta" else first[0])


def test_export_without_values_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    metrics, exports = ModelMetrics(), Exports()
    export = MetricExport(metrics, [exports], None)
    export.export()
    record_call(metrics)
    export.export()
    export.export()
    assert [each[DURATION] for each in exports.counts] == [1]


def test_close_exports_the_last_values() -> None:
    metrics, exports = ModelMetrics(), Exports()
    export = MetricExport(metrics, [exports], None)
    export.start()
    record_call(metrics, first_chunk=None, usage=None)
    export.close()
    assert (exports.counts, exports.is_shut_down) == ([{DURATION: 1}], True)


def test_number_of_model_names_is_bounded() -> None:
    metrics = ModelMetrics()
    for number in range(MAX_MODELS + 20):
        record_call(metrics, model=f"model-{number}")
    record_call(metrics, model=f"model-{MAX_MODELS}")
    durations = {labels[2:4]: sum(counts) for labels, counts, _ in metrics.units[0][0].read()}
    assert durations == {
        **{(f"model-{number}",) * 2: 1 for number in range(MAX_MODELS)},
        ("other", "other"): 21,
    }


def test_number_of_error_codes_is_bounded() -> None:
    metrics = ModelMetrics()
    for number in range(300):
        record_call(metrics, error=f"upstream-{number}")
    assert len(metrics.units[0][0].read()) == 101


@pytest.mark.parametrize("interval", ["0", "-5", "soon", "inf"])
def test_invalid_interval_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interval: str
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    MetricExport(ModelMetrics(), [], None)
    assert "OTEL_METRIC_EXPORT_INTERVAL" in caplog.text
