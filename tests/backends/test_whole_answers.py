"""The same answer, streamed and in one piece, makes the same response."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.backends.anthropic_messages.reader import MessagesReader
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.backends.responses.reader import ResponsesReader
from antiphon.protocol.response import Usage
from antiphon.upstream.delta_stream import Reader
from antiphon.upstream.fields import ServedModel
from support.answers import (
    Json,
    assemble_chat,
    assemble_message,
    find_final_response,
    normalize_response,
    stream_chat,
    stream_message,
    stream_response,
)
from support.replay import replay

WIRE = Path(__file__).parents[1] / "wire"


def make_chat_reader(**quirks: Any) -> ChatReader:
    return ChatReader(
        Quirks(keep_call_extras=True, **quirks),
        estimate=lambda text: Usage(1, len(text), 1 + len(text), estimated=True),
        served_model=ServedModel("up", "m"),
    )


def make_message_reader() -> MessagesReader:
    return MessagesReader({})


def make_responses_reader() -> ResponsesReader:
    return ResponsesReader(served_model=ServedModel("up", "m"))


def read_stream(make_reader: Callable[[], Reader], raw: bytes) -> Json:
    return normalize_response(replay(make_reader, [raw]))


def read_whole(make_reader: Callable[[], Reader], whole: Json) -> Json:
    return normalize_response(replay(make_reader, [f"data: {json.dumps(whole)}\n\n".encode()]))


# Recorded answers. Fixtures of streams that break off, or that break the rules of a stream, have no whole form.

CHAT = [
    "a_bracket_alone", "a_bracket_is_no_tag", "annotations", "arguments_in_the_last_chunk", "arguments_missing",
    "as_documented", "blank_answer", "calls_only_in_the_last_message", "comments_and_carriage_returns",
    "done_missing", "empty_answer", "empty_choices_first", "error_in_a_choice", "finish_content_filter",
    "finish_end_turn", "finish_eos", "finish_error", "finish_length", "finish_length_in_a_call", "finish_max_tokens",
    "finish_stop_with_calls", "finish_unknown", "ids_missing", "interleaved_calls", "last_line_unended",
    "legacy_function_call", "logprobs", "message_repeated_at_the_end", "reasoning", "reasoning_content",
    "reasoning_details", "reasoning_details_summary_and_secret", "reasoning_then_call", "reasoning_under_both_names",
    "refusal", "several_choices", "space_around_calls", "text", "text_and_call", "text_and_call_in_one_chunk",
    "thinking_tags", "thinking_tags_empty", "thinking_tags_then_call", "thinking_tags_unclosed",
    "two_calls_in_one_chunk", "usage_in_every_chunk", "usage_in_the_last_chunk", "usage_missing", "usage_null",
    "text_only_in_the_last_message",
]  # fmt: skip
MESSAGES = [
    "cached", "cut_off_text", "document_citation", "interleaved_thinking", "parallel_tools", "pause",
    "redacted_thinking", "refusal", "stop_sequence", "text", "text_and_tool", "thinking", "thinking_and_tool",
    "unknown_reason", "web_search", "window_full", "withheld_thinking",
]  # fmt: skip
RESPONSES = [
    "annotations_and_logprobs", "calls_interleaved", "code", "completed_that_failed", "custom_call", "empty_message",
    "failed", "image", "incomplete_for_another_reason", "incomplete_length", "mcp", "new_fields", "no_deltas",
    "only_completed", "phases", "reasoning_open_responses", "reasoning_summary_and_seal", "reasoning_text", "refusal",
    "shell", "text", "two_parts", "web_search",
]  # fmt: skip


@pytest.mark.parametrize("name", CHAT)
def test_recorded_completion_is_equal_in_both_forms(name: str) -> None:
    raw = (WIRE / "chat" / f"{name}.sse").read_bytes()
    for make_reader in (make_chat_reader, partial(make_chat_reader, reasoning_field="reasoning_details")):
        assert read_whole(make_reader, assemble_chat(raw)) == read_stream(make_reader, raw)


@pytest.mark.parametrize("name", MESSAGES)
def test_recorded_message_is_equal_in_both_forms(name: str) -> None:
    raw = (WIRE / "anthropic" / f"{name}.sse").read_bytes()
    assert read_whole(make_message_reader, assemble_message(raw)) == read_stream(make_message_reader, raw)


@pytest.mark.parametrize("name", RESPONSES)
def test_recorded_response_is_equal_in_both_forms(name: str) -> None:
    raw = (WIRE / "responses" / f"{name}.sse").read_bytes()
    whole = find_final_response(raw)
    assert read_whole(make_responses_reader, whole) == read_stream(make_responses_reader, raw)


# Generated answers

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
WORDS = st.text('abc é\n<>{}"🎈', min_size=1, max_size=12)
NAMES = st.sampled_from(["f", "g", "get_weather"])
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers() | TEXTS, max_size=2)
SIZES = st.integers(1, 8)
URL = {"url": "https://a.example/", "title": "A"}


def make_tokens(text: str) -> list[Json]:
    return [{"token": each, "logprob": -0.5, "bytes": list(each.encode()), "top_logprobs": []} for each in text]


@st.composite
def completions(draw: st.DrawFn) -> Json:
    tags = draw(st.sampled_from(["", "<think>hm</think>", "<think>\n</think>\n\n", "<think>open ", " \n", "<thin"]))
    content = draw(st.none() | st.just("") | WORDS.map(lambda text: tags + text))
    message: Json = {"role": "assistant", "content": content}
    choice: Json = {"index": 0, "message": message}
    if content and draw(st.booleans()):
        choice["logprobs"] = {"content": make_tokens(content)}
    more: dict[str, st.SearchStrategy[Any]] = {
        "reasoning_content": WORDS,
        "refusal": WORDS,
        "annotations": st.just([{"type": "url_citation", "url_citation": URL | {"start_index": 0, "end_index": 1}}]),
        "tool_calls": st.lists(chat_calls(), min_size=1, max_size=3),
        "function_call": st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS.map(json.dumps)}),
    }
    for name in draw(st.sets(st.sampled_from(sorted(more)), max_size=3)):
        message[name] = draw(more[name])
    reasons = ["stop", "length", "content_filter", "tool_calls", "function_call", "eos", "error", "abort"]
    choice["finish_reason"] = draw(st.sampled_from(reasons))
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {
        "object": "chat.completion",
        "model": draw(st.sampled_from(["m", "acme/m-1"])),
        "choices": [choice],
        "usage": draw(st.none() | st.just(usage)),
    }


@st.composite
def chat_calls(draw: st.DrawFn) -> Json:
    arguments = draw(ARGUMENTS.map(json.dumps) | st.just(""))
    call: Json = {"type": "function", "function": {"name": draw(NAMES), "arguments": arguments}}
    if draw(st.booleans()):
        call["id"] = draw(st.uuids()).hex
    if draw(st.booleans()):
        call["extra_content"] = {"google": {"thought_signature": "s"}}
    return call


@settings(max_examples=5 * settings.default.max_examples)
@given(completions(), SIZES)
def test_completion_is_equal_in_both_forms(whole: Json, size: int) -> None:
    assert read_whole(make_chat_reader, whole) == read_stream(make_chat_reader, stream_chat(whole, size))


BLOCKS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}),
    st.fixed_dictionaries(
        {
            "type": st.just("text"),
            "text": WORDS,
            "citations": st.just([{"type": "web_search_result_location", **URL}, {"type": "char_location", "a": 1}]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": WORDS | st.just(""), "signature": st.just("sig")}),
    st.just({"type": "redacted_thinking", "data": "secret"}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.uuids().map(str), "name": NAMES, "input": ARGUMENTS},
    ),
    st.fixed_dictionaries(
        {"type": st.just("server_tool_use"), "id": st.just("srvtoolu_1"), "name": NAMES, "input": ARGUMENTS}
    ),
    st.just(
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"url": "https://a.example/"}]}
    ),
    st.just({"type": "acme_block", "x": [1, {"y": None}]}),
)
STOP_REASONS = [
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "model_context_window_exceeded",
    "new",
]  # fmt: skip
COUNTS = {"input_tokens": 7, "output_tokens": 5, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1}


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(BLOCKS, max_size=5), st.sampled_from(STOP_REASONS), SIZES)
def test_message_is_equal_in_both_forms(blocks: list[Json], stop_reason: str, size: int) -> None:
    details = {"explanation": "No."} if stop_reason == "refusal" else None
    ending = {"stop_reason": stop_reason, "stop_details": details, "usage": COUNTS}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": blocks} | ending
    assert read_whole(make_message_reader, whole) == read_stream(make_message_reader, stream_message(whole, size))


CITATION = {"type": "url_citation", "start_index": 0, "end_index": 1, **URL}
OUTPUT_TEXTS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("output_text"), "text": WORDS, "annotations": st.sampled_from([[], [CITATION] * 2])}
    ),
    WORDS.map(lambda text: {"type": "output_text", "text": text, "annotations": [], "logprobs": make_tokens(text)}),
    st.fixed_dictionaries({"type": st.just("refusal"), "refusal": WORDS}),
)
SUMMARIES = st.lists(st.fixed_dictionaries({"type": st.just("summary_text"), "text": WORDS}), max_size=2)
THOUGHTS = st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": WORDS}), min_size=1, max_size=2)
ITEMS = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.just("assistant"),
            "content": st.lists(OUTPUT_TEXTS, min_size=1, max_size=2),
        },
        optional={"phase": st.sampled_from(["commentary", "final_answer"])},
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": SUMMARIES},
        optional={"content": THOUGHTS, "encrypted_content": st.just("sealed")},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": st.uuids().map(str),
            "name": NAMES,
            "arguments": ARGUMENTS.map(json.dumps),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("custom_tool_call"), "call_id": st.uuids().map(str), "name": NAMES, "input": WORDS}
    ),
    st.just({"type": "web_search_call", "action": {"type": "search", "query": "a"}}),
    st.just({"type": "acme:item", "x": [1, {"y": None}]}),
)
ENDINGS = [
    {"status": "completed"},
    {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
    {"status": "failed", "error": {"code": "server_error", "message": "Oh."}},
]


@settings(max_examples=5 * settings.default.max_examples)
@given(st.lists(ITEMS, max_size=4), st.sampled_from(ENDINGS), SIZES)
def test_response_is_equal_in_both_forms(items: list[Json], ending: Json, size: int) -> None:
    output = [item | {"id": f"item_{index}", "status": "completed"} for index, item in enumerate(items)]
    if output and ending["status"] == "incomplete" and output[-1]["type"] in ("message", "function_call"):
        output[-1]["status"] = "incomplete"
    usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
    head = {"id": "resp_up", "object": "response", "model": "up-1", "error": None, "incomplete_details": None}
    whole = {**head, "output": output, "usage": usage, **ending}
    assert read_whole(make_responses_reader, whole) == read_stream(make_responses_reader, stream_response(whole, size))


@pytest.mark.parametrize("details", [None, {"reason": "max_output_tokens"}])
def test_whole_response_without_status_has_ended(details: Json | None) -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    whole = {"id": "resp_up", "object": "response", "output": [message], "incomplete_details": details}
    status = "completed" if details is None else "incomplete"
    assert read_whole(make_responses_reader, whole) == read_whole(make_responses_reader, whole | {"status": status})


def test_calls_without_id_and_arguments_are_separate_calls() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": ""}}
    choice = {"message": {"tool_calls": [call, call]}, "finish_reason": "tool_calls"}
    response = read_whole(make_chat_reader, {"model": "m", "choices": [choice]})
    assert [item["arguments"] for item in response["output"]] == [{}, {}]


def test_logprobs_of_tags_and_reasoning_are_left_out() -> None:
    tokens = [make_tokens(each)[0] | {"token": each} for each in ("<think>", "hm", "</think>", "\n\n", "Yes", ".")]
    message = {"content": "<think>hm</think>\n\nYes."}
    choice = {"message": message, "logprobs": {"content": tokens}, "finish_reason": "stop"}
    _, answer = read_whole(make_chat_reader, {"model": "m", "choices": [choice]})["output"]
    assert [token["token"] for token in answer["content"][0]["logprobs"]] == ["Yes", "."]
