"""The current trace, for code that runs with and without traces. Importing this imports no OpenTelemetry."""

from collections.abc import Callable

TRACE_HEADERS = ("traceparent", "tracestate")


class CurrentTrace:
    """Functions that read the current trace. They are None while traces are off.

    `encode_headers` returns the header lines with which an upstream continues the trace. `read_ids` returns the ids of
    the trace and of the span in hex. Outside of a trace they return b"" and None.
    """

    encode_headers: Callable[[], bytes] | None = None
    read_ids: Callable[[], tuple[str, str] | None] | None = None

    @classmethod
    def turn_off(cls) -> None:
        cls.encode_headers = cls.read_ids = None
