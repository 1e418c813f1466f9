"""Samplers, compared with those of the SDK for the same traces."""

import random
from collections.abc import Callable

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from antiphon.telemetry.otlp.provider import OtlpTracerProvider
from antiphon.telemetry.otlp.sampling import make_sampler

NAMES = ["", "always_on", "always_off", "traceidratio"]
NAMES += [f"parentbased_{name}" for name in NAMES[1:]]


@pytest.mark.parametrize("name", NAMES)
def test_sampler_decides_as_that_of_the_sdk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")
    ours = make_sampler()
    provider = TracerProvider(shutdown_on_exit=False)
    generator = random.Random(7)
    for _ in range(50):
        trace_id = generator.getrandbits(128)
        for is_sampled in (None, True, False):
            context = Context()
            if is_sampled is not None:
                parent = NonRecordingSpan(SpanContext(trace_id, 5, True, TraceFlags(int(is_sampled))))
                context = trace.set_span_in_context(parent)
            theirs = provider.sampler.should_sample(context, trace_id, "name").decision.is_sampled()
            assert ours.decide(trace_id, is_parent_sampled=is_sampled) == theirs


@pytest.mark.parametrize("ratio", ["", "2", "half"])
def test_invalid_ratio_records_every_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ratio: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    assert make_sampler().decide(2**64 - 1, is_parent_sampled=None)
    assert f"OTEL_TRACES_SAMPLER_ARG: '{ratio}'" in caplog.text


def test_span_that_is_not_sampled_passes_on_its_trace(
    make_provider: Callable[[], OtlpTracerProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = make_provider().get_tracer("test")
    parent = tracer.start_span("one")
    child = tracer.start_span("two", trace.set_span_in_context(parent))
    contexts = [span.get_span_context() for span in (parent, child)]
    assert [span.is_recording() for span in (parent, child)] == [False, False]
    assert contexts[0].trace_id == contexts[1].trace_id
    assert contexts[0].span_id != contexts[1].span_id
    assert [context.trace_flags.sampled for context in contexts] == [False, False]
