"""Counters, histograms and gauges, and the Prometheus text format (version 0.0.4).

A counter or a histogram has a series for each combination of label values. Callers on the path of a request find a
series once and update it directly.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

OTHER = "other"
"""The label value of all values beyond the limit of a `BoundedLabel`."""

_MAX_VALUE_LENGTH = 128

_get_labels = itemgetter(0)

Labels = tuple[str, ...]
HistogramReading = tuple[Labels, tuple[int, ...], float]
"""The labels of a series, the counts of the buckets, and the sum of the values."""

Readings = Iterable[tuple[Labels, float]]


class Metric(NamedTuple):
    """The name, the description and the label names of a metric."""

    name: str
    description: str
    labels: tuple[str, ...] = ()


class Collector(Protocol):
    """A metric that can be written as text."""

    def write(self) -> Iterable[str]:
        """Yield the lines of the metric."""


class CounterSeries:
    """A number that only grows. One thread updates it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Counter:
    """A counter with a number for each combination of labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._series: dict[Labels, CounterSeries] = {} if metric.labels else {(): CounterSeries()}

    def find_series(self, labels: Labels = ()) -> CounterSeries:
        """Return the number for these labels. A new one begins at zero."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = CounterSeries()
        return series

    def write(self) -> Iterable[str]:
        return _write_samples(
            self._metric,
            "counter",
            [(labels, series.value) for labels, series in sorted(self._series.items(), key=_get_labels)],
        )


class HistogramSeries:
    """The distribution of values. One thread updates it. `counts` has the buckets, each without those below it."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram:
    """A histogram with a distribution for each combination of labels.

    `bounds` are the upper bounds of the buckets, in rising order. The bucket without a bound is added.
    """

    def __init__(self, metric: Metric, bounds: Sequence[float]) -> None:
        self._metric = metric
        self._bounds = bounds
        self._series: dict[Labels, HistogramSeries] = {} if metric.labels else {(): HistogramSeries(bounds)}

    def find_series(self, labels: Labels = ()) -> HistogramSeries:
        """Return the distribution for these labels. A new one is empty."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = HistogramSeries(self._bounds)
        return series

    @property
    def metric(self) -> Metric:
        return self._metric

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds

    def read(self) -> list[HistogramReading]:
        """Return the values of each series. Another thread may call this."""
        return [(labels, tuple(series.counts), series.sum) for labels, series in tuple(self._series.items())]

    def write(self) -> Iterable[str]:
        metric = self._metric
        yield from _write_head(metric, "histogram")
        bounds = [format_number(bound) for bound in (*self._bounds, math.inf)]
        for labels, series in sorted(self._series.items(), key=_get_labels):
            total = 0
            for bound, count in zip(bounds, tuple(series.counts), strict=True):
                total += count
                shown = _format_labels((*metric.labels, "le"), (*labels, bound))
                yield f"{metric.name}_bucket{shown} {total}"
            shown = _format_labels(metric.labels, labels)
            yield f"{metric.name}_sum{shown} {format_number(series.sum)}"
            # The sum of the buckets: another thread may have counted a value since they were read.
            yield f"{metric.name}_count{shown} {total}"


class Reading:
    """A metric whose values are read when it is written."""

    def __init__(self, metric: Metric, kind: Literal["counter", "gauge"], read: Callable[[], Readings]) -> None:
        self._metric = metric
        self._kind = kind
        self._read = read

    def write(self) -> Iterable[str]:
        return _write_samples(self._metric, self._kind, self._read())


class BoundedLabel:
    """Limits the values of a label that clients can choose: those after the first `limit` become `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def bound(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._limit or len(value) > _MAX_VALUE_LENGTH:
            return OTHER
        self._known.add(value)
        return value


def write_text(collectors: Iterable[Collector]) -> bytes:
    """Return all metrics in the text format."""
    lines = [line for collector in collectors for line in collector.write()]
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def format_number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _write_head(metric: Metric, kind: str) -> Iterable[str]:
    description = metric.description.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {metric.name} {description}"
    yield f"# TYPE {metric.name} {kind}"


def _write_samples(metric: Metric, kind: str, readings: Readings) -> Iterable[str]:
    yield from _write_head(metric, kind)
    for labels, value in readings:
        yield f"{metric.name}{_format_labels(metric.labels, labels)} {format_number(value)}"


def _format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
