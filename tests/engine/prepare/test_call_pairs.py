"""Pairing of calls and outputs."""

import pytest

from antiphon.engine.prepare.call_pairs import check_call_pairs, find_answered_calls
from antiphon.errors import InvalidRequest
from antiphon.protocol.hosted import (
    LocalShellAction,
    LocalShellCall,
    LocalShellCallOutput,
    ToolSearchCall,
    ToolSearchOutput,
)
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
)
from antiphon.protocol.unions import Unknown

CALL = FunctionCall("call_1", "f", "{}")
LOCAL = LocalShellCall("call_l", LocalShellAction(["ls"], {}), "lsh_1", "completed")
OUTPUT = FunctionCallOutput("done", "call_1")
CUT = FunctionCall("call_1", "f", '{"x', status="incomplete")


@pytest.mark.parametrize(
    "items",
    [
        [],
        [CALL, OUTPUT],
        [CALL, FunctionCall("call_2", "g", "{}"), FunctionCallOutput("b", "call_2"), OUTPUT],
        [CustomToolCall("c", "patch", "x"), CustomToolCallOutput("c", "ok")],
        [FunctionCallOutput("from nowhere", name="f")],
        [CALL, OUTPUT, Unknown(b'{"type":"acme:x"}')],
        [LOCAL, LocalShellCallOutput("call_l", "a.txt")],
        [ToolSearchCall({}, call_id="call_s", execution="client"), ToolSearchOutput([], call_id="call_s")],
        [ToolSearchCall({}, execution="server"), ToolSearchOutput([], execution="server")],
        [CUT],
        [CUT, OUTPUT],
        [CUT, CALL, OUTPUT],
    ],
)
def test_calls_with_their_outputs_are_accepted(items: list[Item | Unknown]) -> None:
    check_call_pairs(items)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([OUTPUT], "No tool call found for function call output with call_id call_1."),
        ([OUTPUT, CALL], "No tool call found for function call output with call_id call_1."),
        ([CALL, OUTPUT, OUTPUT], "More than one output found for function call output with call_id call_1."),
        ([CALL, CALL, OUTPUT], "More than one function call with call_id call_1."),
        ([CALL, CUT, OUTPUT], "More than one function call with call_id call_1."),
        ([CUT, OUTPUT, OUTPUT], "More than one output found for function call output with call_id call_1."),
        ([CUT, CALL], "No tool output found for function call call_1."),
        ([CALL], "No tool output found for function call call_1."),
        ([CALL, OUTPUT, FunctionCall("call_2", "g", "{}")], "No tool output found for function call call_2."),
        ([CustomToolCall("c", "patch", "x")], "No tool output found for custom tool call c."),
        ([LOCAL], "No tool output found for local shell call call_l."),
        ([LocalShellCallOutput("call_l", "a")], "No tool call found for local shell call output with call_id call_l."),
        ([ToolSearchCall({}, call_id="call_s")], "No tool output found for tool search call call_s."),
    ],
)
def test_call_or_output_without_its_pair_is_refused(items: list[Item | Unknown], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_call_pairs(items)
    assert (caught.value.message, caught.value.param, caught.value.code) == (message, "input", None)


@pytest.mark.parametrize(
    ("items", "answered"),
    [
        ([OUTPUT], {"call_1"}),
        (
            [Message("user", "hi"), CustomToolCallOutput("c", "ok"), LocalShellCallOutput("call_l", "a")],
            {"c", "call_l"},
        ),
        ([CALL, OUTPUT], set()),
        ([OUTPUT, CALL, OUTPUT], {"call_1"}),
        ([ToolSearchCall({}), ToolSearchOutput([]), FunctionCallOutput("from nowhere", name="f")], set()),
    ],
)
def test_output_answers_the_latest_call_with_its_id(items: list[Item | Unknown], answered: set[str]) -> None:
    assert find_answered_calls(items) == answered
