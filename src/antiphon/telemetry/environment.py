"""The standard variables of OpenTelemetry that turn traces and metrics on. Importing this imports no OpenTelemetry."""

import logging
import math
import os

logger = logging.getLogger(__name__)

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
MISSING = "the package opentelemetry-sdk is not installed: pip install 'antiphon[otel]'."
_DEFAULT_INTERVAL = 60.0
_ON_SPANS = ("true", "1", "span_only", "span_and_event")


def is_exporter_configured(signal: str) -> bool:
    """Return True if the environment names an exporter of this signal, `traces` or `metrics`."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
    if exporter:
        return exporter != "none"
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(os.environ.get(name) for name in endpoints)


def captures_content() -> bool:
    """Return True if prompts, answers, arguments and outputs are added to spans."""
    return os.environ.get(CONTENT_VARIABLE, "").strip().lower() in _ON_SPANS


def prefers_delta() -> bool:
    """Return True if each export of metrics has only the values since the last one."""
    preference = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "")
    return preference.strip().lower() in ("delta", "lowmemory")


def read_export_interval() -> float:
    """Return the seconds between two exports of metrics."""
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    try:
        seconds = float(text) / 1000 if text else _DEFAULT_INTERVAL
    except ValueError:
        seconds = 0.0
    if 0 < seconds < math.inf:
        return seconds
    logger.warning("OTEL_METRIC_EXPORT_INTERVAL: %r is not a number of milliseconds; using 60000", text)
    return _DEFAULT_INTERVAL


def read_variable(name: str) -> str:
    """Return the value of a variable without spaces around it, or "" if it is not set."""
    return os.environ.get(name, "").strip()


def read_otlp_variable(name: str) -> str:
    """Return the variable OTEL_EXPORTER_OTLP_TRACES_… of this name, else the one for all signals, else ""."""
    return read_variable(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or read_variable(f"OTEL_EXPORTER_OTLP_{name}")
