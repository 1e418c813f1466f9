"""Output items for the results of client tools. Rejected results are in tests/server/test_agent.py."""

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
def test_result_or_error_message_becomes_the_output(outcome: dict[str, Any], output: str) -> None:
    text = json.dumps([{"CallId": "call_1"} | outcome])
    assert make_output_items([CALL], text) == [{"type": "function_call_output", "call_id": "call_1", "output": output}]


def test_results_without_pending_calls_are_ignored() -> None:
    assert make_output_items([], "nonsense") == []


def test_incomplete_calls_get_no_output() -> None:
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"}
    assert find_complete_calls([CALL | {"status": "incomplete"}, {"type": "message"}, custom]) == [custom]
