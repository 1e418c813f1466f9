"""The headers of a trace, compared with the propagator of OpenTelemetry."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from antiphon.telemetry.current_context import CurrentSpan
from antiphon.telemetry.trace_context import (
    encode_trace_headers,
    format_traceparent,
    parse_trace_headers,
    read_trace_ids,
)

IDS = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
STATES = [
    "a@b=1",
    "0@b=1",
    "0=1",
    "A=1",
    "a=1 ",
    "a= 1",
    "a= ",
    "a=1=2",
    "a=1\r\nx: y",
    "a=\xe4",
    "a=~!",
    f"{'k' * 256}=1",
    f"{'k' * 257}=1",
    ",".join(f"a{number}=1" for number in range(32)),
    ",".join(f"a{number}=1" for number in range(33)),
]
PROPAGATOR = TraceContextTextMapPropagator()


@pytest.mark.parametrize(
    "traceparent",
    [
        f"00-{IDS}-01",
        f"00-{IDS}-00",
        f"00-{IDS}-03",
        f"00-{IDS}-ff",
        f" \t00-{IDS}-01 \t",
        f"00-{IDS}-01-more",
        f"01-{IDS}-01-more",
        f"cc-{IDS}-01",
        f"01-{IDS}-01.more",
        f"ff-{IDS}-01",
        f"00-{IDS.upper()}-01",
        f"00-{IDS}-1",
        f"00-{IDS}",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        f"01-{IDS}-01-{'x' * 600}",
        "",
        "garbage",
        "\xff" * 55,
    ],
)
@pytest.mark.parametrize(
    "tracestate", ["", "a=1,b=2", "a=1, ,b=2", "a=1,a=2", "=", "x" * 600, "a=" + "x" * 300, *STATES]
)
def test_headers_are_parsed_as_by_the_propagator(traceparent: str, tracestate: str) -> None:
    headers = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
    ours = trace.get_current_span(parse_trace_headers(headers)).get_span_context()
    theirs = trace.get_current_span(PROPAGATOR.extract(headers, contexts.Context())).get_span_context()
    assert ours == theirs
    assert dict(ours.trace_state) == dict(theirs.trace_state)


@pytest.mark.parametrize("tracestate", ["", "a=1,b=2"])
def test_headers_are_written_as_by_the_propagator(tracestate: str) -> None:
    headers = {"traceparent": f"00-{IDS}-03"} | ({"tracestate": tracestate} if tracestate else {})
    span = trace.get_current_span(parse_trace_headers(headers))
    with CurrentSpan(span):
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier)
        lines = encode_trace_headers().decode().split("\r\n")[:-1]
        assert dict(line.split(": ", 1) for line in lines) == carrier == headers
        assert format_traceparent() == carrier["traceparent"]
        assert read_trace_ids() == tuple(IDS.split("-"))


@pytest.mark.parametrize("tracestate", ["=", "a=1,b", "a=\x1b[2J", ",".join(f"a{n}=1" for n in range(33)), "x" * 600])
def test_malformed_tracestate_is_ignored_without_a_log_line(tracestate: str, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"traceparent": f"00-{IDS}-01", "tracestate": tracestate}
    with CurrentSpan(trace.get_current_span(parse_trace_headers(headers))):
        assert encode_trace_headers() == f"traceparent: 00-{IDS}-01\r\n".encode()
    assert caplog.records == []


def test_no_span_has_no_headers() -> None:
    assert (encode_trace_headers(), format_traceparent(), read_trace_ids()) == (b"", "", None)
