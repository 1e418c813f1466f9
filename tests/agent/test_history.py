"""A history from elsewhere is mended, so that no server refuses it."""

from typing import Any

import pytest

from antiphon.agent.history import STRAY, mend
from antiphon.protocol.items import LOST_OUTPUT

USER = {"role": "user", "content": "Go."}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


def call(call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}


def output(call_id: str = "call_1", text: str = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


@pytest.mark.parametrize(
    "whole",
    [
        [USER, SAID],
        [USER, THOUGHT, call(), output(), SAID],
        [USER, call(), call("call_2"), output("call_2"), output()],
        # An id may come again, once it was answered.
        [USER, call(), output(), call(), output(text="5")],
        [USER, THOUGHT, call(), SAID, output(), USER],
    ],
)
def test_what_is_whole_stays_as_it_is(whole: list[dict[str, Any]]) -> None:
    assert mend(whole) == whole


@pytest.mark.parametrize(
    ("broken", "mended"),
    [
        ([USER, THOUGHT, call()], [USER, THOUGHT, call(), output(text=LOST_OUTPUT)]),
        (
            [call(), call("call_2"), output("call_2")],
            [call(), output(text=LOST_OUTPUT), call("call_2"), output("call_2")],
        ),
        ([USER, output()], [USER, {"role": "user", "content": f"{STRAY} 4"}]),
        ([call(), output(), output()], [call(), output(), {"role": "user", "content": f"{STRAY} 4"}]),
        ([USER, THOUGHT], [USER]),
        ([USER, THOUGHT, USER, SAID], [USER, USER, SAID]),
        ([call(), THOUGHT, output()], [call(), output()]),
    ],
    ids=[
        "call at the end",
        "call between",
        "lone output",
        "output twice",
        "thought at the end",
        "thought",
        "in between",
    ],
)
def test_what_is_broken_is_mended_and_nothing_is_lost(
    broken: list[dict[str, Any]], mended: list[dict[str, Any]]
) -> None:
    assert mend(broken) == mended
    assert mend(mended) == mended


def test_ids_that_nobody_refers_to_are_left_out() -> None:
    stored = [{"id": "rs_1", "status": None} | THOUGHT, {"id": "fc_1", "status": "completed"} | call(), output()]
    reference = {"type": "item_reference", "id": "msg_1"}
    assert mend([reference, *stored]) == [reference, THOUGHT, call(), output()]
