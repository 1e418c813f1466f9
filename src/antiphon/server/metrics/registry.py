"""Counters, histograms and gauges, and the Prometheus text format (version 0.0.4)."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

OTHER = "other"
"""The label value of all values beyond the limit of a `BoundedLabel`."""

_MAX_VALUE_LENGTH = 128

Labels = tuple[str, ...]
Series = tuple[Labels, tuple[int, ...], float]
"""The labels of a histogram's values, the counts of the buckets, and the sum."""

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


class Counter:
    """A number that only grows, for each combination of labels. One thread updates it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[Labels, float] = {} if metric.labels else {(): 0}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def write(self) -> Iterable[str]:
        return _write_samples(self._metric, "counter", sorted(self._values.items()))


class Histogram:
    """The distribution of values, for each combination of labels. One thread updates it.

    `bounds` are the upper bounds of the buckets, in rising order. The bucket without a bound is added.
    """

    def __init__(self, metric: Metric, bounds: Sequence[float]) -> None:
        self._metric = metric
        self._bounds = bounds
        self._series: dict[Labels, _Values] = {} if metric.labels else {(): _Values(len(bounds) + 1)}

    def observe(self, value: float, labels: Labels = ()) -> None:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Values(len(self._bounds) + 1)
        series.counts[bisect_left(self._bounds, value)] += 1
        series.sum += value

    @property
    def metric(self) -> Metric:
        return self._metric

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds

    def read(self) -> list[Series]:
        """Return the labels, the counts of the buckets and the sum of each series. Another thread may call this."""
        return [(labels, tuple(series.counts), series.sum) for labels, series in tuple(self._series.items())]

    def write(self) -> Iterable[str]:
        metric = self._metric
        yield from _write_head(metric, "histogram")
        bounds = [format_number(bound) for bound in (*self._bounds, math.inf)]
        for labels, series in sorted(self._series.items()):
            total = 0
            for bound, count in zip(bounds, tuple(series.counts), strict=True):
                total += count
                shown = _format_labels((*metric.labels, "le"), (*labels, bound))
                yield f"{metric.name}_bucket{shown} {total}"
            shown = _format_labels(metric.labels, labels)
            yield f"{metric.name}_sum{shown} {format_number(series.sum)}"
            # The sum of the buckets: another thread may have counted a value since they were read.
            yield f"{metric.name}_count{shown} {total}"


class _Values:
    """The counts of the buckets, each without those below it."""

    __slots__ = ("counts", "sum")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.sum = 0.0


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
