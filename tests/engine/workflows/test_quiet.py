import logging

import pytest

from antiphon.engine.workflows import quiet
from antiphon.engine.workflows.quiet import Quiet


def make_record(message: str, *, failed: bool = False) -> logging.LogRecord:
    failure = (OSError, OSError("no way"), None) if failed else None
    return logging.LogRecord("dbos", logging.WARNING, "", 0, message, (), failure)


def test_a_line_of_a_kind_is_told_once_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(quiet.time, "monotonic", lambda: now[0])
    quietly = Quiet()
    told = []
    for now[0] in (0.0, 1.0, 59.9, 60.0, 61.0):
        told.append(quietly.filter(make_record(f"Exception encountered in the thread for queue x: try {now[0]}")))
    assert told == [True, False, False, True, False]
    assert quietly.filter(make_record("Something else")) is True


def test_it_is_told_without_its_traceback() -> None:
    record = make_record("Exception listing queues: refused\nIs the server running?", failed=True)
    assert Quiet().filter(record) is True
    assert (record.getMessage(), record.exc_info) == ("Exception listing queues: refused", None)


def test_what_differs_only_in_the_response_is_of_one_kind() -> None:
    quietly = Quiet()
    told = [quietly.filter(make_record(f"Workflow resp_{number} has a fault")) for number in range(3)]
    assert told == [True, False, False]


def test_of_a_traceback_the_failure_is_told() -> None:
    record = make_record("Polling: Traceback (most recent call last):\n  File x\nos.Error: no way\n(See there)")
    assert Quiet().filter(record) is True
    assert record.getMessage() == "Polling: os.Error: no way"


@pytest.mark.parametrize(
    "message",
    ["Asyncio task cancelled for workflow x", "Workflow resp_1 outcome was not recorded: no longer owned", ""],
)
def test_what_is_no_fault_is_not_told(message: str) -> None:
    assert Quiet().filter(make_record(message)) is (message == "")


def test_the_memory_of_kinds_is_bounded() -> None:
    quietly = Quiet()
    assert all(quietly.filter(make_record(f"{number} is a kind")) for number in range(500))
    assert len(quietly._told) <= 100
