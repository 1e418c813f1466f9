"""The engine in the process of `antiphon chat`, and interrupts at any moment."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import pytest

from antiphon.cli import local_engine
from antiphon.cli.local_engine import LocalEngine
from antiphon.config.loading import load
from antiphon.protocol.events import OutputTextDelta
from antiphon.protocol.request import CreateRequest

SCRIPT = {"rules": [{"user": "wait", "answers": [[{"text": "One "}, {"wait": "never"}]]}], "default": "Hello."}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    monkeypatch.setattr(local_engine, "MAX_WAIT_SECONDS", 0.01)
    backends = {"scripted": {"kind": "scripted", "script": SCRIPT}}
    settings = load(None, {"HOME": str(tmp_path)}, {"store": "memory:", "backends": backends})
    with closing(LocalEngine(settings)) as started:
        yield started


def make_request(text: str) -> CreateRequest:
    return CreateRequest(model="scripted", input=text, stream=True)


def interrupt_after(calls: int) -> Callable[[FrameType, str, object], None]:
    """Return a profile function that raises KeyboardInterrupt after this number of calls of functions in C.

    There Python looks for signals, so that an interrupt is raised in the frame of the caller.
    """
    left = calls

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("c_return", "c_exception"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("calls", range(20))
def test_interrupt_at_any_moment_of_a_wait_leaves_a_working_engine(engine: LocalEngine, calls: int) -> None:
    with closing(engine.stream(make_request("wait"))) as events:
        while not isinstance(next(events), OutputTextDelta):
            pass
        with pytest.raises(KeyboardInterrupt):
            sys.setprofile(interrupt_after(calls))
            for _ in events:
                pass
    # A lock that the interrupt has left would stop the event loop.
    assert "".join(e.delta for e in engine.stream(make_request("hi")) if isinstance(e, OutputTextDelta)) == "Hello."
