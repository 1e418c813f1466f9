"""The switch for OpenTelemetry: the standard `OTEL_*` variables. Without them, OpenTelemetry is not imported."""

import logging
from typing import TYPE_CHECKING

from antiphon.engine.engine import Engine
from antiphon.telemetry.environment import MISSING, is_exporter_configured

if TYPE_CHECKING:
    from antiphon.server.telemetry.server_telemetry import ServerTelemetry

logger = logging.getLogger(__name__)


def make_telemetry(engine: Engine) -> "ServerTelemetry | None":
    """Return the traces and metrics that the environment turns on, or None if there are none.

    A server without the package starts without them and logs a warning.
    """
    traces, metrics = is_exporter_configured("traces"), is_exporter_configured("metrics")
    if not traces and not metrics:
        return None
    try:
        from antiphon.server.telemetry.server_telemetry import ServerTelemetry

        return ServerTelemetry(engine, traces=traces, metrics=metrics)
    except ImportError:
        logger.warning("the OTEL_* variables have no effect: %s", MISSING)
    return None
