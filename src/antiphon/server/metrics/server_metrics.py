"""The metrics of a server. docs/guides/metrics.md describes each of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from platform import python_version

from antiphon.backends.base import QueuedBackend
from antiphon.backends.upstream_backend import UpstreamBackend
from antiphon.engine.engine import Engine
from antiphon.entry_points import find_own_version
from antiphon.errors import AntiphonError
from antiphon.protocol.response import Response, Usage
from antiphon.server.http import HttpRequest
from antiphon.server.limits.limiter import Limiter
from antiphon.server.metrics.process import make_process_metrics
from antiphon.server.metrics.registry import (
    OTHER,
    BoundedLabel,
    Collector,
    Counter,
    CounterSeries,
    Histogram,
    HistogramSeries,
    Metric,
    Reading,
    Readings,
    write_text,
)
from antiphon.server.metrics.worker_metrics import label_text, merge_texts
from antiphon.turn_queue import TurnQueue
from antiphon.upstream.client import UpstreamClient

MAX_MODELS = 64
"""Number of model names with values of their own. A client can choose any name if an upstream takes any."""

_UNKNOWN_ROUTE = "unknown"
_UPGRADE = 101
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
# Time for which a scrape waits for the store.
_STORE_SECONDS = 1.0
_STATES = ("closed", "half_open", "open")

_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_WRITES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_RequestKey = tuple[str, str, int]
"""The pattern of the route, the method and the status of a request."""

_RequestSeries = tuple[CounterSeries, HistogramSeries | None]


class ServerMetrics:
    """Counts requests and responses, and reads the state of the engine when the metrics are written.

    Implements `EngineObserver`. Everything runs on the event loop, except `count_write`.
    """

    def __init__(self, engine: Engine, get_limiter: Callable[[], Limiter | None] = lambda: None) -> None:
        self._engine = engine
        self._get_limiter = get_limiter
        self._models = BoundedLabel(MAX_MODELS)
        self._waiting: float | None = None
        self._requests = Counter(
            Metric("antiphon_http_requests_total", "Ended HTTP requests.", ("route", "method", "status"))
        )
        self._durations = Histogram(
            Metric(
                "antiphon_http_request_duration_seconds", "Time until the end of the response.", ("route", "method")
            ),
            _DURATIONS,
        )
        first_tokens = Histogram(
            Metric("antiphon_time_to_first_token_seconds", "Time until the first output of a streamed response."),
            _DURATIONS,
        )
        self._responses = Counter(Metric("antiphon_responses_total", "Ended responses.", ("status",)))
        self._input_tokens = Counter(Metric("antiphon_input_tokens_total", "Input tokens.", ("model",)))
        self._output_tokens = Counter(Metric("antiphon_output_tokens_total", "Output tokens.", ("model",)))
        write_times = Histogram(
            Metric("antiphon_store_write_duration_seconds", "Time of a batch of writes, until it is on disk."), _WRITES
        )
        write_failures = Counter(
            Metric("antiphon_store_write_failures_total", "Writes that the storage could not execute.")
        )
        self._first_tokens = first_tokens.find_series()
        self._write_times = write_times.find_series()
        self._write_failures = write_failures.find_series()
        self._request_series: dict[_RequestKey, _RequestSeries] = {}
        self._token_series: dict[str, tuple[CounterSeries, CounterSeries]] = {}
        self._collectors: list[Collector] = [
            self._requests,
            self._durations,
            first_tokens,
            self._responses,
            self._input_tokens,
            self._output_tokens,
            write_times,
            write_failures,
            *self._make_engine_metrics(),
            *self._make_limit_metrics(),
            *self._make_upstream_metrics(),
            *make_process_metrics(),
        ]
        self._shared = list(self._make_shared_metrics())
        self._worker = 1
        self._collect_others: Callable[[], Awaitable[list[bytes]]] | None = None
        engine.observe(self)

    # Counted as they happen

    def count_request(self, http_request: HttpRequest) -> None:
        """Count a request that has ended."""
        key = (http_request.route_path, http_request.method, http_request.status)
        ended, durations = self._request_series.get(key) or self._find_request_series(key)
        ended.value += 1
        if durations is not None:
            durations.observe(http_request.elapsed_ms / 1000)

    def _find_request_series(self, key: _RequestKey) -> _RequestSeries:
        route_path, method, status = key
        is_known = method in _METHODS
        labels = (route_path or _UNKNOWN_ROUTE, method if is_known else OTHER)
        ended = self._requests.find_series((*labels, f"{status // 100}xx" if status else "none"))
        # The duration of a WebSocket is that of the connection.
        series = ended, None if status == _UPGRADE else self._durations.find_series(labels)
        if is_known:  # a client can send any other method
            self._request_series[key] = series
        return series

    def watch_first_token(self, http_request: HttpRequest) -> "FirstToken":
        """Measure the time until the first output of a stream. Must be called before the stream begins."""
        first_token = FirstToken(http_request, self._first_tokens)
        http_request.call_at_next_write(first_token.record)
        return first_token

    def count_response(self, response: Response, model: str) -> None:
        self._responses.find_series((response.status or OTHER,)).value += 1
        self.count_tokens(model, response.usage)

    def count_tokens(self, model: str, usage: Usage | None) -> None:
        if usage is not None:
            input_tokens, output_tokens = self._token_series.get(model) or self._find_token_series(model)
            input_tokens.value += usage.input_tokens
            output_tokens.value += usage.output_tokens

    def _find_token_series(self, model: str) -> tuple[CounterSeries, CounterSeries]:
        label = self._models.bound(model)
        series = self._input_tokens.find_series((label,)), self._output_tokens.find_series((label,))
        if label == model:
            self._token_series[model] = series
        return series

    def count_write(self, seconds: float, failures: int) -> None:
        self._write_times.observe(seconds)
        if failures:
            self._write_failures.value += failures

    # Read when they are written

    async def write(self) -> bytes:
        """Return all metrics in the text format of Prometheus, of all workers if there are several."""
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                self._waiting = await self._engine.count_waiting()
        except (AntiphonError, TimeoutError):  # the other metrics are needed most when the store fails
            self._waiting = None
        if self._collect_others is None:
            return write_text((*self._collectors, *self._shared))
        others = await self._collect_others()
        return merge_texts((write_text(self._shared), self.write_own(), *others))

    def join(self, worker: int, collect_others: Callable[[], Awaitable[list[bytes]]]) -> None:
        """Write the metrics of all workers. `worker` is the number of this one."""
        self._worker = worker
        self._collect_others = collect_others

    def write_own(self) -> bytes:
        """Return the metrics of this worker."""
        return label_text(write_text(self._collectors), self._worker)

    def _make_engine_metrics(self) -> Iterable[Collector]:
        engine = self._engine
        yield Reading(
            Metric("antiphon_responses_in_progress", "Responses that this process works on.", ("kind",)),
            "gauge",
            lambda: [(("foreground",), engine.foreground_count), (("background",), engine.background_count)],
        )

        def list_queues() -> Iterable[tuple[str, TurnQueue]]:
            for name, backend in engine.backends.items():
                if isinstance(backend, QueuedBackend) and backend.queue is not None:
                    yield name, backend.queue

        yield Reading(
            Metric("antiphon_queue_waiting", "Turns that wait for a slot of the backend.", ("backend",)),
            "gauge",
            lambda: [((name,), queue.waiting) for name, queue in list_queues()],
        )
        yield Reading(
            Metric("antiphon_queue_running", "Turns that hold a slot of the backend.", ("backend",)),
            "gauge",
            lambda: [((name,), queue.running) for name, queue in list_queues()],
        )

    def _make_shared_metrics(self) -> Iterable[Collector]:
        """Yield the metrics that are the same in all workers."""
        yield Reading(
            Metric("antiphon_background_waiting", "Background responses in the store that no process works on."),
            "gauge",
            lambda: [] if self._waiting is None else [((), self._waiting)],
        )
        yield Reading(
            Metric("antiphon_build_info", "Always 1. The labels have the versions.", ("version", "python")),
            "gauge",
            lambda: [((find_own_version(), python_version()), 1)],
        )

    def _make_limit_metrics(self) -> Iterable[Collector]:
        def read_refusals() -> Readings:
            limiter = self._get_limiter()
            refusals = self._engine.refusals | ({} if limiter is None else limiter.refusals)
            for name, count in sorted(refusals.items()):
                yield (name,), count

        yield Reading(
            Metric("antiphon_limited_requests_total", "Requests refused by a limit of a key or project.", ("limit",)),
            "counter",
            read_refusals,
        )

    def _make_upstream_metrics(self) -> Iterable[Collector]:
        def list_upstreams() -> Iterable[tuple[str, UpstreamClient]]:
            for name, backend in self._engine.backends.items():
                if isinstance(backend, UpstreamBackend):
                    yield name, backend.upstream

        def read_errors() -> Readings:
            for name, upstream in list_upstreams():
                for kind, count in sorted(upstream.error_counts.items()):
                    yield (name, kind), count

        def read_states() -> Readings:
            for name, upstream in list_upstreams():
                current = upstream.circuit_breaker.state
                for state in _STATES:
                    yield (name, state), int(state == current)

        yield Reading(
            Metric("antiphon_upstream_errors_total", "Failed attempts at upstreams.", ("backend", "kind")),
            "counter",
            read_errors,
        )
        yield Reading(
            Metric("antiphon_breaker_state", "1 for the state of the circuit breaker.", ("backend", "state")),
            "gauge",
            read_states,
        )
        yield Reading(
            Metric("antiphon_breaker_paused_projects", "Projects paused by the circuit breaker.", ("backend",)),
            "gauge",
            lambda: [((name,), upstream.circuit_breaker.paused_projects) for name, upstream in list_upstreams()],
        )


class FirstToken:
    """The measurement of the time until the first output of one stream."""

    __slots__ = ("_http_request", "_is_recorded", "_times")

    def __init__(self, http_request: HttpRequest, times: HistogramSeries) -> None:
        self._http_request = http_request
        self._times = times
        self._is_recorded = False

    def record(self) -> None:
        """Record the time, at the first call. An answer in one piece calls this when it is sent."""
        if not self._is_recorded:
            self._is_recorded = True
            self._times.observe(self._http_request.elapsed_ms / 1000)
