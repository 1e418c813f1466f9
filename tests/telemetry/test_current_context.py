"""The current context of OpenTelemetry, set and read without its functions."""

import asyncio
import subprocess
import sys

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.trace import NonRecordingSpan, SpanContext

from antiphon.telemetry.current_context import (
    CurrentSpan,
    find_current_span,
    make_context,
    read_context,
    reset_context,
    set_context,
)

SPAN = NonRecordingSpan(SpanContext(1, 2, is_remote=False))


def test_opentelemetry_reads_the_context_that_was_set() -> None:
    token = set_context(make_context(SPAN))
    assert trace.get_current_span() is SPAN
    assert find_current_span() is SPAN
    reset_context(token)
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert find_current_span() is None


def test_context_of_opentelemetry_is_read() -> None:
    with trace.use_span(SPAN):
        assert find_current_span() is SPAN
    assert find_current_span() is None


def test_current_span_leaves_the_rest_of_the_context() -> None:
    token = contexts.attach(baggage.set_baggage("tenant", "one"))
    with CurrentSpan(SPAN):
        assert (trace.get_current_span(), baggage.get_baggage("tenant")) == (SPAN, "one")
    contexts.detach(token)
    assert not read_context()


def test_reset_in_another_task_is_an_error() -> None:
    async def set_in_a_task() -> object:
        return set_context(make_context(SPAN))

    async def main() -> object:
        return await asyncio.create_task(set_in_a_task())

    token = asyncio.run(main())
    with pytest.raises(ValueError, match="different Context"):
        reset_context(token)


REPLACED = """
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

class Storage:
    current = context.Context()
    def attach(self, new):
        old, self.current = self.current, new
        return old
    def get_current(self):
        return self.current
    def detach(self, token):
        self.current = token

context._RUNTIME_CONTEXT = Storage()
from antiphon.telemetry.current_context import CurrentSpan, find_current_span

span = NonRecordingSpan(SpanContext(1, 2, is_remote=False))
with CurrentSpan(span):
    assert trace.get_current_span() is span
    assert find_current_span() is span
assert find_current_span() is None
"""


def test_other_storage_of_the_context_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
