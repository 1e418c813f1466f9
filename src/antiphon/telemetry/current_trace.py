"""The current trace, for code that runs with and without traces. Importing this imports no OpenTelemetry."""

from collections.abc import Callable, Mapping


class CurrentTrace:
    """Functions that read the current trace. They are None while traces are off.

    `make_headers` returns the headers with which an upstream continues the trace. `read_ids` returns the ids of the
    trace and of the span in hex, or None outside of a trace.
    """

    make_headers: Callable[[], Mapping[str, str]] | None = None
    read_ids: Callable[[], tuple[str, str] | None] | None = None

    @classmethod
    def turn_off(cls) -> None:
        cls.make_headers = cls.read_ids = None


def add_trace_headers(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the headers of a request together with those of the current trace, if traces are on."""
    make_headers = CurrentTrace.make_headers
    if make_headers is None:
        return headers
    return {**make_headers(), **(headers or {})}
