"""The rest of a request."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.backends.anthropic_messages.backend import create
from antiphon.protocol import codec

HELLO = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}


def test_a_plain_request_says_no_more_than_it_must(write: Any) -> None:
    assert write(HELLO) == {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32_000,
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    }


def test_the_longest_answer_is_the_requests_word(write: Any) -> None:
    assert write(HELLO, max_output_tokens=7)["max_tokens"] == 7


@pytest.mark.parametrize(
    ("tier", "written"),
    [("auto", "auto"), ("default", "standard_only"), ("flex", "standard_only"), ("priority", "auto"), (None, None)],
)
def test_the_service_tier_is_told_as_far_as_there_is_one(write: Any, tier: str | None, written: str | None) -> None:
    assert write(HELLO, service_tier=tier).get("service_tier") == written


@pytest.mark.parametrize(
    ("parameters", "metadata"),
    [
        ({"safety_identifier": "s", "user": "u"}, {"user_id": "s"}),
        ({"user": "u"}, {"user_id": "u"}),
        ({"metadata": {"k": "v"}}, None),
    ],
)
def test_who_asks_is_told_by_the_identifier_alone(write: Any, parameters: Any, metadata: Any) -> None:
    assert write(HELLO, **parameters).get("metadata") == metadata


def test_a_schema_is_enforced_upstream(write: Any) -> None:
    body = write(HELLO, text={"format": FORMAT}, reasoning={"effort": "high"}, model="claude-opus-5")
    assert body["output_config"] == {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    assert "system" not in body


@pytest.mark.parametrize(
    ("model", "schema"),
    [("claude-opus-4-1", SCHEMA), ("claude-opus-5", {"type": "object", "additionalProperties": {"type": "string"}})],
)
def test_a_schema_that_cannot_be_enforced_is_asked_for(write: Any, model: str, schema: Any) -> None:
    body = write(HELLO, text={"format": {**FORMAT, "schema": schema}}, model=model)
    assert "output_config" not in body
    assert '"type": "object"' in body["system"][0]["text"]


def test_a_json_object_and_a_verbosity_are_asked_for(write: Any) -> None:
    body = write(HELLO, text={"format": {"type": "json_object"}, "verbosity": "low"}, instructions="Be kind.")
    assert [block["text"] for block in body["system"]] == [
        "Be kind.",
        "Keep your answers short.",
        "Answer with a JSON object and nothing else.",
    ]


META = ["client_metadata"]


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ("claude-3-5-haiku", [["top_p"], ["top_p", "reasoning.effort"], ["top_p", "reasoning.effort"], [], META]),
        ("claude-sonnet-4-5", [["top_p"], ["temperature", "top_p"], ["top_p"], [], META]),
        ("claude-opus-5", [["temperature", "top_p"], ["temperature", "top_p"], ["temperature", "top_p"], [], META]),
    ],
)
def test_what_is_not_sent_to_a_model_is_known(tmp_path: Path, model: str, idle: list[list[str]]) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.5, "text": {"verbosity": "low"}}
    thinking = {"reasoning": {"effort": "low"}}
    wishes = [
        sampling,
        sampling | thinking,
        sampling | thinking | {"tool_choice": "required"},
        {"temperature": 1, "top_p": 1, "reasoning": {"effort": "none"}},
        {"client_metadata": {"session": "s"}, "user": "u", "prompt_cache_key": "k"},
    ]
    asked = [codec.decode_request(codec.encode({"model": model, "input": "Hi"} | each)).request for each in wishes]
    list_idle = create("claude", {}, tmp_path).capabilities.list_idle
    assert list_idle is not None
    assert [list_idle(each, model) for each in asked] == idle
