"""Completing histories so that servers accept them, and dropping encrypted reasoning."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.agent.history import (
    STRAY,
    UNANSWERED,
    HistoryCompleter,
    cannot_decrypt,
    complete_history,
    drop_compacted,
    drop_encrypted,
    has_unsupported_call,
    is_empty_reasoning,
    refuses_encryption,
)
from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, UnsupportedParameter, UpstreamError
from antiphon.protocol.items import LOST_OUTPUT

USER = {"role": "user", "content": "Go."}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


def call(call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": "{}"}


def output(call_id: str = "call_1", text: str = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


# For each call type other than functions: a call, its output, and the text of each without the other.
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
def test_other_call_with_its_output_is_unchanged(kind: str) -> None:
    made, result, _, _ = PAIRS[kind]
    whole = [USER, THOUGHT, made, result, ANSWER]
    assert (complete_history(whole), has_unsupported_call(whole)) == (whole, False)


@pytest.mark.parametrize("kind", PAIRS)
def test_other_call_without_output_becomes_a_message(kind: str) -> None:
    made, _, words, _ = PAIRS[kind]
    message = {"role": "user", "content": f"{UNANSWERED} {words}\n{LOST_OUTPUT}"}
    # Its effect is unknown, so no output is invented.
    assert complete_history([USER, THOUGHT, made, USER]) == [USER, message, USER]
    assert has_unsupported_call([USER, made])


@pytest.mark.parametrize("kind", PAIRS)
def test_output_without_call_becomes_a_message(kind: str) -> None:
    _, result, _, words = PAIRS[kind]
    content = f"{STRAY} {words}" if isinstance(words, str) else [{"type": "input_text", "text": STRAY}, *words]
    assert complete_history([USER, result]) == [USER, {"role": "user", "content": content}]


def test_call_and_output_of_different_types_are_not_paired() -> None:
    _, result, _, _ = PAIRS["shell"]
    kinds = [item.get("type", "message") for item in complete_history([call("c"), result])]
    assert kinds == ["function_call", "function_call_output", "message"]


def test_calls_of_the_server_are_unchanged() -> None:
    own: list[dict[str, Any]] = [
        {"type": "tool_search_call", "id": "ts_1", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "id": "ts_2", "call_id": None, "execution": "server", "tools": []},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "code_interpreter_call", "id": "ci_1", "container_id": "c", "code": None, "status": "completed"},
    ]
    assert (complete_history(own), has_unsupported_call(own)) == (own, False)


def test_images_in_an_output_without_call_stay_images() -> None:
    parts = [{"type": "input_text", "text": "Here."}, {"type": "input_image", "image_url": PICTURE}]
    (message,) = complete_history([output() | {"output": parts}])
    assert message == {"role": "user", "content": [{"type": "input_text", "text": STRAY}, *parts]}


@pytest.mark.parametrize(
    "whole",
    [
        [USER, ANSWER],
        [USER, THOUGHT, call(), output(), ANSWER],
        [USER, call(), call("call_2"), output("call_2"), output()],
        # An id may be reused after its output.
        [USER, call(), output(), call(), output(text="5")],
        [USER, THOUGHT, call(), ANSWER, output(), USER],
    ],
)
def test_complete_history_is_unchanged(whole: list[dict[str, Any]]) -> None:
    assert complete_history(whole) == whole


@pytest.mark.parametrize(
    ("broken", "completed"),
    [
        ([USER, THOUGHT, call()], [USER, THOUGHT, call(), output(text=LOST_OUTPUT)]),
        (
            [call(), call("call_2"), output("call_2")],
            [call(), output(text=LOST_OUTPUT), call("call_2"), output("call_2")],
        ),
        ([USER, output()], [USER, {"role": "user", "content": f"{STRAY} 4"}]),
        ([call(), output(), output()], [call(), output(), {"role": "user", "content": f"{STRAY} 4"}]),
        ([USER, THOUGHT], [USER]),
        ([USER, THOUGHT, USER, ANSWER], [USER, USER, ANSWER]),
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
def test_broken_history_is_completed_without_loss(
    broken: list[dict[str, Any]], completed: list[dict[str, Any]]
) -> None:
    assert complete_history(broken) == completed
    assert complete_history(completed) == completed


_GROWTH = st.lists(
    st.builds(
        lambda kind, call_id: {"type": kind, "call_id": call_id} if call_id else {"type": kind, "role": "assistant"},
        st.sampled_from(
            [
                "message",
                "reasoning",
                "compaction",
                "function_call",
                "function_call_output",
                "computer_call",
                "computer_call_output",
                "tool_search_call",
                "tool_search_output",
            ]
        ),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=6,
)


@given(st.lists(_GROWTH, max_size=6))
def test_growing_history_is_completed_like_a_whole_one(additions: list[list[dict[str, Any]]]) -> None:
    completer, history = HistoryCompleter(), list[dict[str, Any]]()
    for items in additions:
        history += items
        whole = complete_history(drop_compacted(history))
        assert completer.complete(history) == [item for item in whole if not is_empty_reasoning(item)]


def test_other_history_is_completed_from_its_start() -> None:
    completer, first = HistoryCompleter(), {"role": "user", "content": "first"}
    assert completer.complete([first]) == [first]
    assert completer.complete([{"role": "user", "content": "other"}]) == [{"role": "user", "content": "other"}]


def test_unreferenced_ids_are_removed() -> None:
    stored = [{"id": "rs_1", "status": None} | OPEN, {"id": "fc_1", "status": "completed"} | call(), output()]
    references = [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}]
    assert complete_history([*references, *stored]) == [*references, OPEN, call(), output()]


def test_encrypted_reasoning_keeps_its_id() -> None:
    stored = [{"id": "rs_1", "status": None} | THOUGHT, call(), output()]
    assert complete_history(stored) == [{"id": "rs_1"} | THOUGHT, call(), output()]
    assert drop_encrypted([{"id": "rs_1"} | seal(OPEN)]) == [OPEN]


# Encrypted reasoning


OPEN = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
HOLLOW = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
PLAIN_ANSWER = {"role": "assistant", "content": "Well."}
COMPACTED = {"type": "compaction", "encrypted_content": "y"}


def seal(item: dict[str, object]) -> dict[str, object]:
    return item | {"encrypted_content": "x"}


@pytest.mark.parametrize(
    ("error", "about_it"),
    [
        (InvalidRequest("Encrypted content is not supported with this model.", param="include"), True),
        (InvalidRequest("400: Encrypted content is not supported with this model."), True),
        (InvalidRequest("Invalid value: 'reasoning.encrypted_content'."), True),
        (InvalidRequest("Unknown value.", param="include[0]"), True),
        (UnsupportedParameter("Unknown parameter: 'include'.", param="include"), True),
        (InvalidRequest("No.", param="input"), False),
        (InvalidRequest("The encrypted content could not be verified.", code="invalid_encrypted_content"), False),
        (UpstreamError("Encrypted content is not supported with this model."), False),
        (RateLimited("Slow down.", param="include"), False),
    ],
)
def test_error_of_a_model_without_encryption_is_recognised(error: AntiphonError, about_it: bool) -> None:
    assert refuses_encryption(error) is about_it


def test_decryption_error_is_recognised_by_its_code() -> None:
    assert cannot_decrypt(InvalidRequest("No.", code="invalid_encrypted_content"))
    assert not cannot_decrypt(InvalidRequest("No.", param="input"))


def test_readable_reasoning_stays_without_encrypted_content() -> None:
    items = [PLAIN_ANSWER, seal(OPEN), seal(HOLLOW), HOLLOW, OPEN, COMPACTED]
    assert drop_encrypted(items) == [PLAIN_ANSWER, OPEN, HOLLOW, OPEN, COMPACTED]
