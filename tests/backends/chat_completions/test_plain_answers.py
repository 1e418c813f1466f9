"""Whole answers that are text and nothing else take a short path, with the same deltas as the general one."""

import json
from typing import Any

import pytest

from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.errors import AntiphonError
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import Finish, Text, TokenUsage
from antiphon.stream.sse import SseMessage
from antiphon.upstream.fields import ServedModel

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}


def make_body(message: dict[str, Any] | None = None, choice: dict[str, Any] | None = None, **fields: Any) -> bytes:
    message = {"role": "assistant", "content": "Hello."} | (message or {})
    choices = [{"index": 0, "message": message, "finish_reason": "stop"} | (choice or {})]
    return json.dumps({"id": "c", "model": "small", "choices": choices, "usage": USAGE} | fields).encode()


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOKENS = {"content": [{"token": "Hello.", "logprob": -0.1, "bytes": None, "top_logprobs": []}]}

PLAIN = [
    make_body(),
    make_body(object="chat.completion", system_fingerprint="fp"),
    make_body({"refusal": None, "tool_calls": [], "annotations": [], "reasoning_content": ""}),
    make_body({"content": "\n\nHello <think>world</think>"}),
    make_body(model="large"),
    make_body(model=3),
    make_body(usage=None),
    make_body(usage={"prompt_tokens": -1}),
    make_body({"content": 'Grüße 🌍 \\ " \n'}),
]
OTHER = [
    make_body({"content": ""}),
    make_body({"content": None}),
    make_body({"content": " \n"}),
    make_body({"content": "<"}),
    make_body({"content": "<think>Why?</think>Because."}),
    make_body({"content": " <think>Why?"}),
    make_body({"content": "<b>Bold</b>"}),
    make_body({"content": [{"type": "text", "text": "Hello."}]}),
    make_body({"reasoning_content": "Hm."}),
    make_body({"refusal": "No."}),
    make_body({"tool_calls": [CALL]}),
    make_body({"annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "A"}}]}),
    make_body(choice={"finish_reason": "length"}),
    make_body(choice={"finish_reason": None}),
    make_body(choice={"finish_reason": "error"}),
    make_body(choice={"logprobs": TOKENS}),
    make_body(choice={"error": {"message": "It failed."}}),
    make_body(choice={"index": 1}),
    make_body(choice={"message": None, "delta": {"content": "Hello."}}),
    make_body(error={"message": "It failed."}),
    make_body(object="error", detail="It failed."),
    make_body(x_groq={"usage": USAGE}),
    make_body(choices=[]),
    b'{"error": {"message": "It failed."}}',
    b"[DONE]",
    b"{",
]


def read(body: bytes, *, is_whole: bool, quirks: Quirks) -> object:
    reader = ChatReader(
        quirks,
        estimate=lambda text: Usage(0, len(text), len(text), estimated=True),
        served_model=ServedModel("backend", "small"),
        is_whole=is_whole,
    )
    assert not reader.is_complete
    try:
        deltas = [*(reader.read_plain_answer(body) or reader.read(SseMessage(None, body)))]
        if not reader.finished:
            deltas += reader.end()
    except AntiphonError as error:
        return type(error), error.message, error.code
    assert reader.finished
    return deltas


@pytest.mark.parametrize("quirks", [Quirks(), Quirks(thinking_tags=False), Quirks(thinking_open=True)])
@pytest.mark.parametrize("body", PLAIN + OTHER)
def test_whole_answer_gives_the_deltas_of_the_general_path(body: bytes, quirks: Quirks) -> None:
    assert read(body, is_whole=True, quirks=quirks) == read(body, is_whole=False, quirks=quirks)


@pytest.mark.parametrize("body", PLAIN)
def test_plain_answer_is_read_in_one_step(body: bytes) -> None:
    reader = ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), is_whole=True)
    assert reader.read_plain_answer(body)
    assert reader.finished


@pytest.mark.parametrize("body", OTHER)
def test_other_answers_are_left_to_the_general_path(body: bytes) -> None:
    reader = ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), is_whole=True)
    assert not reader.read_plain_answer(body)
    assert not reader.finished


def test_stream_in_spite_of_a_whole_request_is_read() -> None:
    reader = ChatReader(Quirks(), estimate=lambda _: Usage(0, 0, 0), is_whole=True)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Hello."}, "finish_reason": "stop"}]}
    assert [*reader.read(SseMessage(None, json.dumps(chunk).encode()))] == [Text("Hello.")]
    assert [*reader.end()] == [TokenUsage(Usage(0, 0, 0)), Finish()]
