"""Providers and exporters of OpenTelemetry, made from the standard `OTEL_*` variables."""

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace

from antiphon.entry_points import find_own_version
from antiphon.errors import ConfigError

# These variables name a plug-in that makes the HTTP session of the SDK's exporter.
_CREDENTIAL_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)

_GRPC = "otlp_proto_grpc"
# The extra `otel` has no exporter for gRPC.
_ADVICE = {
    _GRPC: "pip install opentelemetry-exporter-otlp-proto-grpc, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf.",
    "otlp_proto_http": "pip install 'antiphon[otel]'.",
}
_OTHER_ADVICE = "install its package, or use one of otlp, console, none."


def find_provider(*, shutdown_on_exit: bool = True) -> trace.TracerProvider:
    """Return the global provider if the program has set one, else a new one with the exporters of the environment.

    The new provider is not made global: the program may still set its own. Without `shutdown_on_exit`, the caller shuts
    it down. Raises ImportError without the SDK, and ConfigError for an exporter that is not installed or a variable
    that is not valid.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return provider
    try:
        if _uses_own_tracer():
            from antiphon.telemetry.otlp.provider import OtlpTracerProvider

            user_agent = f"antiphon/{find_own_version()}"
            return OtlpTracerProvider(make_resource, user_agent=user_agent, shutdown_on_exit=shutdown_on_exit)
        return _make_sdk_provider(shutdown_on_exit=shutdown_on_exit)
    except ValueError as error:  # of OTEL_BSP_* or OTEL_SPAN_*
        raise ConfigError(f"The OTEL_* variables of traces are not valid: {error}") from None


def _uses_own_tracer() -> bool:
    """Return True if the only exporter is OTLP over HTTP. All other exporters need spans of the SDK."""
    if any(os.environ.get(name) for name in _CREDENTIAL_PROVIDERS):
        return False
    return _read_exporter_names("traces") == ["otlp"] and _read_protocol("traces") != "grpc"


def _make_sdk_provider(*, shutdown_on_exit: bool) -> trace.TracerProvider:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = make_exporters("traces")
    made = TracerProvider(resource=make_resource(), shutdown_on_exit=shutdown_on_exit)
    for exporter in exporters:
        made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def make_resource() -> Any:
    """Return the description of this process: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES."""
    from opentelemetry.sdk.resources import Resource

    is_named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if is_named else {"service.name": "antiphon"})


def make_exporters(signal: str) -> Sequence[Any]:
    """Return the exporters that OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER names. The default is OTLP over HTTP.

    Raises ImportError without the SDK, and ConfigError for an exporter that is not installed or cannot be made.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    return [_make_exporter(signal, variable, name) for name in _read_exporter_names(signal)]


def _read_exporter_names(signal: str) -> list[str]:
    names = (
        name.strip().lower() or "otlp" for name in os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").split(",")
    )
    return [name for name in dict.fromkeys(names) if name != "none"]


def _read_protocol(signal: str) -> str:
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
    return (own or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")).strip().lower()


def _make_exporter(signal: str, variable: str, name: str) -> Any:
    if name == "otlp":
        name = _GRPC if _read_protocol(signal) == "grpc" else "otlp_proto_http"
    found = list(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
    if not found:
        raise ConfigError(f"{variable}: no exporter '{name}' is installed: {_ADVICE.get(name, _OTHER_ADVICE)}")
    try:
        made = found[0].load()()
    except ValueError as error:  # such as a time limit that is not a number
        raise ConfigError(f"{variable}: the exporter '{name}' cannot be made: {error}") from None
    if not hasattr(made, "export"):
        raise ConfigError(f"{variable}: '{name}' serves metrics and exports none. Use the setting `metrics` instead.")
    return made
