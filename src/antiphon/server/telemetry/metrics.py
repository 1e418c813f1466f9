"""Metrics of model calls after the semantic conventions of OpenTelemetry, and their export.

The histograms are those of `/metrics`. An instrument of the SDK takes more than ten times as long for a value, which
is more than a request may pay. So a thread reads the histograms at each interval and passes them to the exporters.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from antiphon.engine.model_calls import CallLabels
from antiphon.entry_points import find_own_version
from antiphon.protocol.response import Usage
from antiphon.server.metrics import registry
from antiphon.server.metrics.registry import BoundedLabel, Histogram, HistogramReading, HistogramSeries, Labels
from antiphon.server.metrics.server_metrics import MAX_MODELS
from antiphon.telemetry.conventions import SCOPE
from antiphon.telemetry.environment import prefers_delta, read_export_interval

logger = logging.getLogger(__name__)

# The bounds are those of the conventions.
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# Token counts are integers, and Python compares them with floats more slowly.
_TOKENS = tuple(4**power for power in range(14))
_LABELS = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "server.address",
    "server.port",
)
_EXPORT_MILLISECONDS = 10_000
# An upstream can report any code.
_MAX_ERRORS = 100


class _CallSeries(NamedTuple):
    """The series of model calls with the same labels."""

    durations: HistogramSeries
    first_chunks: HistogramSeries
    input_tokens: HistogramSeries
    output_tokens: HistogramSeries


class ModelMetrics:
    """The metrics of model calls. Implements `ModelCallMetrics`. Everything but `read` runs on the event loop."""

    def __init__(self) -> None:
        self._models = BoundedLabel(MAX_MODELS)
        self._errors = BoundedLabel(_MAX_ERRORS)
        self._series: dict[CallLabels, _CallSeries] = {}
        self._durations = _make("gen_ai.client.operation.duration", "Duration of a model call.", _SECONDS, "error.type")
        self._first_chunks = _make(
            "gen_ai.client.operation.time_to_first_chunk", "Time until the first part of a streamed answer.", _SECONDS
        )
        self._tokens = _make("gen_ai.client.token.usage", "Tokens of a model call.", _TOKENS, "gen_ai.token.type")
        self.units = ((self._durations, "s"), (self._first_chunks, "s"), (self._tokens, "{token}"))

    def record_call(self, labels: CallLabels, seconds: float, first_chunk: float | None, usage: Usage | None) -> None:
        series = self._series.get(labels) or self._find_series(labels)
        series.durations.observe(seconds)
        if first_chunk is not None:
            series.first_chunks.observe(first_chunk)
        if usage is not None:
            series.input_tokens.observe(usage.input_tokens)
            series.output_tokens.observe(usage.output_tokens)

    def _find_series(self, labels: CallLabels) -> _CallSeries:
        provider, request_model, response_model, address, port, error = labels
        bound = self._models.bound
        shared = ("chat", provider, bound(request_model), bound(response_model), address, port)
        bounded_error = self._errors.bound(error)
        series = _CallSeries(
            self._durations.find_series((*shared, bounded_error)),
            self._first_chunks.find_series(shared),
            self._tokens.find_series((*shared, "input")),
            self._tokens.find_series((*shared, "output")),
        )
        if (request_model, response_model, error) == (*shared[2:4], bounded_error):  # not replaced by `other`
            self._series[labels] = series
        return series


class MetricExport:
    """Passes the metrics to the exporters, in a thread, every OTEL_METRIC_EXPORT_INTERVAL milliseconds."""

    def __init__(self, metrics: ModelMetrics, exporters: Sequence[Any], resource: Any) -> None:
        self._metrics = metrics
        self._exporters = exporters
        self._resource = resource
        self._is_delta = prefers_delta()
        self._interval = read_export_interval()
        self._started_at = time.time_ns()
        self._exported: dict[tuple[str, Labels], tuple[tuple[int, ...], float]] = {}
        self._exported_at = self._started_at
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="antiphon-metric-export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Export once more and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for exporter in self._exporters:
            exporter.shutdown()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.export()
        self.export()

    def export(self) -> None:
        """Pass the current values to all exporters."""
        data = self._make_data()
        if data is None:
            return
        for exporter in self._exporters:
            try:
                exporter.export(data, timeout_millis=_EXPORT_MILLISECONDS)
            except Exception:
                logger.warning("metrics could not be exported", exc_info=True)

    def _make_data(self) -> MetricsData | None:
        now = time.time_ns()
        temporality = AggregationTemporality.DELTA if self._is_delta else AggregationTemporality.CUMULATIVE
        metrics = [
            Metric(histogram.metric.name, histogram.metric.description, unit, HistogramData(points, temporality))
            for histogram, unit in self._metrics.units
            if (points := self._make_points(histogram, now))
        ]
        self._exported_at = now
        if not metrics:
            return None
        scope = ScopeMetrics(InstrumentationScope(SCOPE, find_own_version()), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _make_points(self, histogram: Histogram, now: int) -> list[HistogramDataPoint]:
        series, began = histogram.read(), self._started_at
        if self._is_delta:
            series, began = [self._subtract(histogram.metric.name, each) for each in series], self._exported_at
        return [_make_point(histogram, each, began, now) for each in series if any(each[1])]

    def _subtract(self, name: str, series: HistogramReading) -> HistogramReading:
        """Return the values since the last export."""
        labels, counts, total = series
        before, sum_before = self._exported.get((name, labels), ((0,) * len(counts), 0.0))
        self._exported[name, labels] = counts, total
        return labels, tuple(new - old for new, old in zip(counts, before, strict=True)), total - sum_before


def _make_point(histogram: Histogram, series: HistogramReading, began: int, now: int) -> HistogramDataPoint:
    labels, counts, total = series
    names = histogram.metric.labels
    attributes: dict[str, str | int] = {
        name: int(value) if name == "server.port" else value for name, value in zip(names, labels, strict=True) if value
    }
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=began,
        time_unix_nano=now,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
        explicit_bounds=[float(bound) for bound in histogram.bounds],
        # The extremes are not recorded. Exporters leave None out.
        min=None,
        max=None,
    )


def _make(name: str, description: str, bounds: Sequence[float], *labels: str) -> Histogram:
    return Histogram(registry.Metric(name, description, (*_LABELS, *labels)), bounds)
