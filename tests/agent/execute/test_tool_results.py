"""Results for calls: the outputs that come of them. What is refused is in tests/server/test_agent.py."""

import json
from typing import Any

import pytest

from antiphon.agent.execute.tool_results import make_output_items
from antiphon.agent.history import find_complete_calls

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("outcome", "output"),
    [
        ({"ResultJson": '{"a":1}'}, '{"a":1}'),
        ({"resultJson": {"a": 1}}, '{"a":1}'),
        ({"result_json": ""}, ""),
        ({"ResultJson": False}, "false"),
        ({"ErrorMessage": "no"}, '{"error":"no"}'),
        ({"ErrorMessage": "no", "ResultJson": ""}, '{"error":"no"}'),
        ({"ErrorMessage": "", "ResultJson": "1"}, "1"),
    ],
)
def test_a_result_or_an_error_is_the_output(outcome: dict[str, Any], output: str) -> None:
    text = json.dumps([{"CallId": "call_1"} | outcome])
    assert make_output_items([CALL], text) == [{"type": "function_call_output", "call_id": "call_1", "output": output}]


def test_without_calls_nothing_is_read() -> None:
    assert make_output_items([], "nonsense") == []


def test_calls_that_were_cut_off_cannot_be_answered() -> None:
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"}
    assert find_complete_calls([CALL | {"status": "incomplete"}, {"type": "message"}, custom]) == [custom]
