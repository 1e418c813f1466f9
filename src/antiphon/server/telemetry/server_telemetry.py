"""The traces and metrics of a server process: their parts, their start and their end.

This module imports OpenTelemetry.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from antiphon.agent import tracing
from antiphon.engine.engine import Engine
from antiphon.engine.telemetry import EngineTelemetry
from antiphon.errors import ConfigError
from antiphon.server.telemetry.metrics import MetricExport, ModelMetrics
from antiphon.server.telemetry.spans import RequestSpans
from antiphon.telemetry.conventions import make_tracer, turn_on_current_trace
from antiphon.telemetry.environment import captures_content
from antiphon.telemetry.export import find_provider, make_exporters, make_resource
from antiphon.telemetry.log_limit import LogLimit

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The last spans and metrics are exported within this time, or lost: a collector that is down must not delay the end.
CLOSE_SECONDS = 5.0


class ServerTelemetry:
    """The traces and metrics of a server. `spans` is None without traces.

    Exporters run in threads of their own. If they are too slow, or the collector is down, spans are dropped.
    """

    def __init__(self, engine: Engine, *, traces: bool, metrics: bool) -> None:
        exporters = _try(lambda: make_exporters("metrics")) if metrics else None
        self._provider = _try(lambda: find_provider(shutdown_on_exit=False)) if traces else None
        self._export: MetricExport | None = None
        self.spans: RequestSpans | None = None
        _limit_log()
        model_metrics = tracer = None
        if exporters:
            model_metrics = ModelMetrics()
            self._export = MetricExport(model_metrics, exporters, make_resource())
        captures = captures_content()
        if self._provider is not None:
            tracer = make_tracer(self._provider)
            self.spans = RequestSpans(tracer)
            turn_on_current_trace()
            if not tracing.is_decided():  # agent runs on this server
                tracing.instrument(self._provider, capture_content=captures)
        if tracer is not None or model_metrics is not None:
            engine.trace(EngineTelemetry(tracer, model_metrics, captures_content=captures))

    def start(self) -> None:
        if self._export is not None:
            self._export.start()

    async def close(self) -> None:
        """Export the last spans and metrics."""
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def close() -> None:
            try:
                self._close_exporters()
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=close, name="antiphon-telemetry-close", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await closed.wait()
        except TimeoutError:
            logger.warning("the last spans or metrics could not be exported within %g seconds", CLOSE_SECONDS)

    def _close_exporters(self) -> None:
        try:
            if self._export is not None:
                self._export.close()
        finally:
            shutdown = getattr(self._provider, "shutdown", None)
            if shutdown is not None:
                shutdown()


def _try(make: Callable[[], T]) -> T | None:
    """Return the result, or None with a warning if the variables of this signal are wrong."""
    try:
        return make()
    except ConfigError as error:
        logger.warning("%s", error.message)
        return None


def _limit_log() -> None:
    for name in ("http.trace_exporter", "http.metric_exporter", "grpc.exporter"):
        exporter = logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}")
        if not any(isinstance(each, LogLimit) for each in exporter.filters):
            exporter.addFilter(LogLimit())
