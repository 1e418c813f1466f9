"""A receiver of traces and metrics, and the variables that name it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from antiphon.agent import tracing

if TYPE_CHECKING:
    from support.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> "Iterator[OtlpReceiver]":
    from support.otlp_receiver import OtlpReceiver

    with OtlpReceiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setattr(tracing._Switch, "is_decided", False)
        yield running
    tracing.uninstrument()
