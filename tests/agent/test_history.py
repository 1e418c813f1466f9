"""A history from elsewhere is mended, so that no server refuses it."""

from typing import Any

import pytest

from antiphon.agent.history import STRAY, UNANSWERED, complete_history, has_unsupported_call
from antiphon.protocol.items import LOST_OUTPUT

USER = {"role": "user", "content": "Go."}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


def call(call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}


def output(call_id: str = "call_1", text: str = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


# Of every kind of call that is not a function's: the call, its output, and the words of each without the other.
PRINTED = {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
PICTURE = "data:image/png;base64,aGk="
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any]] = {
    "shell": (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "c", "output": [PRINTED]},
        '{"type":"shell_call","action":{"commands":["ls"]}}',
        '[{"stdout":"a.txt","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "local shell": (
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "c",
            "action": {"command": ["ls"]},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        '{"type":"local_shell_call","action":{"command":["ls"]}}',
        "a.txt",
    ),
    "local shell, with both ids": (
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "c",
            "action": {"command": ["ls"]},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "lsho_1", "call_id": "c", "output": "a.txt"},
        '{"type":"local_shell_call","action":{"command":["ls"]}}',
        "a.txt",
    ),
    "computer": (
        {
            "type": "computer_call",
            "id": "cu_1",
            "call_id": "c",
            "action": {"type": "screenshot"},
            "status": "completed",
        },
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": PICTURE},
        },
        '{"type":"computer_call","action":{"type":"screenshot"}}',
        [{"type": "input_image", "image_url": PICTURE}],
    ),
    "patch": (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file"}, "status": "completed"},
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
        '{"type":"apply_patch_call","operation":{"type":"delete_file"}}',
        "failed",
    ),
    "tool search": (
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}, "status": "completed"},
        {"type": "tool_search_output", "call_id": "c", "tools": []},
        '{"type":"tool_search_call","execution":"client","arguments":{}}',
        "[]",
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_call_of_another_kind_and_its_output_stay_as_they_are(kind: str) -> None:
    made, result, _, _ = PAIRS[kind]
    whole = [USER, THOUGHT, made, result, SAID]
    assert (complete_history(whole), has_unsupported_call(whole)) == (whole, False)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_call_of_another_kind_without_its_output_is_told_in_words(kind: str) -> None:
    made, _, words, _ = PAIRS[kind]
    told = {"role": "user", "content": f"{UNANSWERED} {words}\n{LOST_OUTPUT}"}
    # Nobody has seen what came of it, so there is no output to make up.
    assert complete_history([USER, THOUGHT, made, USER]) == [USER, told, USER]
    assert has_unsupported_call([USER, made])


@pytest.mark.parametrize("kind", PAIRS)
def test_an_output_of_another_kind_without_its_call_is_told_in_words(kind: str) -> None:
    _, result, _, words = PAIRS[kind]
    content = f"{STRAY} {words}" if isinstance(words, str) else [{"type": "input_text", "text": STRAY}, *words]
    assert complete_history([USER, result]) == [USER, {"role": "user", "content": content}]


def test_a_call_and_an_output_of_different_kinds_do_not_belong_together() -> None:
    _, result, _, _ = PAIRS["shell"]
    kinds = [item.get("type", "message") for item in complete_history([call("c"), result])]
    assert kinds == ["function_call", "function_call_output", "message"]


def test_what_a_server_has_done_itself_stays_as_it_is() -> None:
    own: list[dict[str, Any]] = [
        {"type": "tool_search_call", "id": "ts_1", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "id": "ts_2", "call_id": None, "execution": "server", "tools": []},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "code_interpreter_call", "id": "ci_1", "container_id": "c", "code": None, "status": "completed"},
    ]
    assert (complete_history(own), has_unsupported_call(own)) == (own, False)


def test_pictures_of_an_output_without_its_call_stay_pictures() -> None:
    parts = [{"type": "input_text", "text": "Here."}, {"type": "input_image", "image_url": PICTURE}]
    (told,) = complete_history([output() | {"output": parts}])
    assert told == {"role": "user", "content": [{"type": "input_text", "text": STRAY}, *parts]}


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
    assert complete_history(whole) == whole


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
    assert complete_history(broken) == mended
    assert complete_history(mended) == mended


def test_ids_that_nobody_refers_to_are_left_out() -> None:
    stored = [{"id": "rs_1", "status": None} | THOUGHT, {"id": "fc_1", "status": "completed"} | call(), output()]
    references = [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}]
    assert complete_history([*references, *stored]) == [*references, THOUGHT, call(), output()]
