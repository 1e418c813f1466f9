"""Whole answers that are text and nothing else take a short path, with the same result as the general one."""

import json
from typing import Any

import pytest

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.errors import AntiphonError
from antiphon.protocol.response import Response
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Finish, Text, TokenUsage
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.sse import SseMessage
from antiphon.upstream.fields import ServedModel

USAGE = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}


def make_body(part: dict[str, Any] | None = None, message: dict[str, Any] | None = None, **fields: Any) -> bytes:
    content = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []} | (part or {})
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [content]}
    response = {"id": "resp_1", "object": "response", "status": "completed", "model": "small", "usage": USAGE}
    return json.dumps(response | {"output": [item | (message or {})]} | fields).encode()


CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
TEXT = {"type": "output_text", "text": "Hello."}
TOKEN = {"token": "Hello.", "logprob": -0.1, "bytes": [72], "top_logprobs": []}

PLAIN = [
    make_body(),
    make_body({"text": 'Grüße 🌍 \\ " \n'}),
    make_body({"annotations": None, "logprobs": None, "other": 1}),
    make_body(message={"status": None, "phase": None}),
    make_body(message={"id": 5, "role": "model"}),
    make_body(model="large"),
    make_body(model=3),
    make_body(error=None, incomplete_details=None, tools=[], output_text="Hello."),
    make_body(incomplete_details={"reason": "max_output_tokens"}),
    make_body(usage={"prompt_tokens": 1, "completion_tokens": 2}),
]
OTHER = [
    make_body({"text": ""}),
    make_body({"text": None}),
    make_body({"text": 5}),
    make_body({"annotations": [{"type": "url_citation", "url": "https://a.example", "title": "A"}]}),
    make_body({"annotations": ["?"]}),
    make_body({"logprobs": [TOKEN]}),
    make_body({"type": "refusal", "refusal": "No."}),
    make_body({"type": "other"}),
    make_body(message={"content": [TEXT, TEXT]}),
    make_body(message={"content": []}),
    make_body(message={"content": "Hello."}),
    make_body(message={"status": "incomplete"}),
    make_body(message={"phase": "final_answer"}),
    make_body(message={"phase": "other"}),
    make_body(message={"extra": {"a": 1}}),
    make_body(message={"type": "reasoning", "summary": []}),
    make_body(output=[]),
    make_body(output=None),
    make_body(output=[CALL]),
    make_body(output=[CALL, {"type": "message", "content": [TEXT]}]),
    make_body(status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
    make_body(status="failed", error={"message": "It failed.", "code": "server_error"}),
    make_body(status=None),
    make_body(type="response.completed"),
    make_body(usage=None),
    make_body(usage={"input_tokens": -1}),
    b"{}",
    b"{",
]


def make_reader(limits: AnswerLimits | None = None, **options: Any) -> ResponsesReader:
    return ResponsesReader(served_model=ServedModel("backend", "small"), limits=limits or AnswerLimits(), **options)


def compose(body: bytes, *, is_short: bool) -> object:
    """Return the response and all events of an answer, read by the short path if it applies, or the error."""
    reader = make_reader()
    try:
        answer = (reader.read_plain_answer(body) if is_short else ()) or reader.read(SseMessage(None, body))
    except AntiphonError as error:
        return type(error), error.message, error.code
    composer = Composer(
        Response(id="resp_2", created_at=0, model="small"), new_id=lambda prefix: f"{prefix}_2", now=lambda: 1
    )
    return composer.start(), composer.compose(answer), composer.response


@pytest.mark.parametrize("body", PLAIN + OTHER)
def test_whole_answer_has_the_events_of_the_general_path(body: bytes) -> None:
    assert compose(body, is_short=True) == compose(body, is_short=False)


@pytest.mark.parametrize("body", PLAIN)
def test_plain_answer_is_read_in_one_step(body: bytes) -> None:
    reader = make_reader()
    kinds = [type(delta) for delta in reader.read_plain_answer(body)]
    assert kinds[-3:] == [Text, TokenUsage, Finish]
    assert reader.finished


@pytest.mark.parametrize("body", OTHER)
def test_other_answers_are_left_to_the_general_path(body: bytes) -> None:
    reader = make_reader()
    assert not reader.read_plain_answer(body)
    assert not reader.finished


def test_answer_that_is_recorded_or_over_the_limit_takes_the_general_path() -> None:
    recorded: list[str] = []
    reader = make_reader(on_completed=lambda response_id, output: recorded.append(response_id))
    assert not reader.read_plain_answer(make_body())
    reader.read(SseMessage(None, make_body()))
    assert recorded == ["resp_1"]
    reader = make_reader(AnswerLimits(max_answer_items=0))
    assert not reader.read_plain_answer(make_body())
    with pytest.raises(AntiphonError, match="max_answer_items"):
        reader.read(SseMessage(None, make_body()))
