"""The tracer provider of a process: the program's own, or one made from the standard `OTEL_*` variables."""

import os
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace

from antiphon.errors import ConfigError

_GROUP = "opentelemetry_traces_exporter"


def find_provider() -> trace.TracerProvider:
    """Return the global provider if the program has set one, else a new one with the exporters of the environment.

    The new provider is not made global: the program may still set its own. Raises ImportError without the SDK, and
    ConfigError for an exporter that is not installed.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return provider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    default_name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "antiphon"}
    made = TracerProvider(resource=Resource.create(default_name))
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(","):
        made.add_span_processor(BatchSpanProcessor(_make_exporter(name.strip().lower() or "otlp")))
    return made


def _make_exporter(name: str) -> Any:
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = list(entry_points(group=_GROUP, name=name))
    if not found:
        raise ConfigError(f"OTEL_TRACES_EXPORTER: no exporter '{name}' is installed: pip install 'antiphon[otel]'.")
    return found[0].load()()
