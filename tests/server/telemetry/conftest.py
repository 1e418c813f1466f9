"""A receiver of traces and metrics, and the variables that name it."""

from collections.abc import Iterator

import pytest

from antiphon.agent import tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from support.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setattr(tracing._Switch, "is_decided", False)
        yield running
    tracing.uninstrument()
