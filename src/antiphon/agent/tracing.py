"""The switch for traces of agent runs. `spans.py` makes the spans with OpenTelemetry.

OpenTelemetry is imported only if traces are on: after `instrument()`, or if a standard `OTEL_*` variable names an
exporter of traces. Other runs pay for one look at a variable of this module.
"""

import logging
import os
from typing import TYPE_CHECKING

from antiphon.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from antiphon.agent.spans import Tracing

logger = logging.getLogger(__name__)

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ON_SPANS = ("true", "1", "span_only", "span_and_event")
_MISSING = "Traces need the package opentelemetry-sdk: pip install 'antiphon[otel]'."


class _Switch:
    """The traces of this process. `is_decided` is False until the environment was read."""

    tracing: "Tracing | None" = None
    is_decided = False


def instrument(tracer_provider: "TracerProvider | None" = None, *, capture_content: bool | None = None) -> None:
    """Turn on traces of all agent runs in this process.

    Spans go to `tracer_provider`; without it, to the global provider, or to the exporter that the `OTEL_*` variables
    name. `capture_content` adds prompts, answers, arguments and outputs to the spans. Without it, the variable
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT decides, and the default is off. Raises ConfigError if
    OpenTelemetry is not installed, or if it has no exporter of the name in OTEL_TRACES_EXPORTER.
    """
    try:
        from antiphon.agent import spans
        from antiphon.agent.trace_export import find_provider

        provider = tracer_provider or find_provider()
    except ImportError:
        raise ConfigError(_MISSING) from None
    captures = _captures_content() if capture_content is None else capture_content
    _Switch.tracing, _Switch.is_decided = spans.Tracing(provider, captures_content=captures), True


def uninstrument() -> None:
    """Turn off traces of agent runs in this process."""
    _Switch.tracing, _Switch.is_decided = None, True


def find_tracing() -> "Tracing | None":
    """Return the traces of this process, or None if they are off. The first call reads the environment."""
    if not _Switch.is_decided:
        _decide()
    return _Switch.tracing


def make_trace_headers() -> dict[str, str] | None:
    """Return the headers with which a server continues the current trace, or None if traces are off."""
    return None if _Switch.tracing is None else _Switch.tracing.make_headers()


def flush_traces() -> None:
    """Export the spans that are waiting. Call this before the process ends without its clean-up."""
    if _Switch.tracing is not None:
        _Switch.tracing.flush()


def _decide() -> None:
    _Switch.is_decided = True
    if not _is_exporter_configured():
        return
    try:
        instrument()
    except ConfigError as error:
        logger.warning("agent runs are not traced: %s", error.message)


def _is_exporter_configured() -> bool:
    """Return True if the environment names an exporter of traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get(_EXPORTER, "").strip().lower()
    if exporter:
        return exporter != "none"
    return any(os.environ.get(name) for name in _ENDPOINTS)


def _captures_content() -> bool:
    return os.environ.get(CONTENT_VARIABLE, "").strip().lower() in _ON_SPANS
