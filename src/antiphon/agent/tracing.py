"""The switch for traces of agent runs. `spans.py` makes the spans with OpenTelemetry.

OpenTelemetry is imported only if traces are on: after `instrument()`, or if a standard `OTEL_*` variable names an
exporter of traces. Other runs pay for one look at a variable of this module.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon.errors import ConfigError
from antiphon.protocol.json_text import JsonObject
from antiphon.telemetry.current_trace import CurrentTrace
from antiphon.telemetry.environment import MISSING, captures_content, is_exporter_configured

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from antiphon.agent.spans import RunTrace, Tracing

logger = logging.getLogger(__name__)


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
        from antiphon.telemetry.conventions import turn_on_current_trace
        from antiphon.telemetry.export import find_provider

        provider = tracer_provider or find_provider()
    except ImportError:
        raise ConfigError(f"Traces are not possible: {MISSING}") from None
    captures = captures_content() if capture_content is None else capture_content
    _Switch.tracing, _Switch.is_decided = spans.Tracing(provider, captures_content=captures), True
    turn_on_current_trace()


def uninstrument() -> None:
    """Turn off traces of agent runs in this process."""
    _Switch.tracing, _Switch.is_decided = None, True
    CurrentTrace.turn_off()


def is_decided() -> bool:
    """Return True if traces were turned on or off in this process."""
    return _Switch.is_decided


def find_tracing() -> "Tracing | None":
    """Return the traces of this process, or None if they are off. The first call reads the environment."""
    if not _Switch.is_decided:
        _decide()
    return _Switch.tracing


def start_trace(run_id: str, *, agent: str, model: str, items: Sequence[JsonObject]) -> "RunTrace | None":
    """Start the span of a run that has no agent object: a review, or a turn of the execute endpoint."""
    tracing = find_tracing()
    if tracing is None:
        return None
    return tracing.start_run(run_id, agent=agent, model=model, parent_id=None, session_id=None, earlier="", items=items)


def make_trace_headers() -> dict[str, str] | None:
    """Return the headers with which a server continues the current trace, or None if traces are off."""
    return None if _Switch.tracing is None else _Switch.tracing.make_headers()


def flush_traces() -> None:
    """Export the spans that are waiting. Call this before the process ends without its clean-up."""
    if _Switch.tracing is not None:
        _Switch.tracing.flush()


def _decide() -> None:
    _Switch.is_decided = True
    if not is_exporter_configured("traces"):
        return
    try:
        instrument()
    except ConfigError as error:
        logger.warning("agent runs are not traced: %s", error.message)
