"""Fixtures for the tracer of OTLP."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from antiphon.telemetry.otlp.provider import OtlpTracerProvider
    from support.otlp_receiver import OtlpReceiver, Reply


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., OtlpReceiver]]":
    """Start a receiver with the given answers, and set the variable that names it."""
    from support.otlp_receiver import OtlpReceiver

    started: list[OtlpReceiver] = []

    def start(*replies: "Reply") -> OtlpReceiver:
        started.append(OtlpReceiver(replies).__enter__())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started[-1].url)
        return started[-1]

    yield start
    for receiver in started:
        receiver.__exit__()


@pytest.fixture
def make_provider() -> "Iterator[Callable[[], OtlpTracerProvider]]":
    """Make providers of the environment. They are shut down at the end, without waiting for their export."""
    from antiphon.telemetry.export import find_provider
    from antiphon.telemetry.otlp.provider import OtlpTracerProvider

    made: list[OtlpTracerProvider] = []

    def make() -> OtlpTracerProvider:
        provider = find_provider(shutdown_on_exit=False)
        assert isinstance(provider, OtlpTracerProvider)
        made.append(provider)
        return provider

    yield make
    for provider in made:
        provider.shutdown(0)
