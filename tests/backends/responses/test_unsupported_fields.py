"""Omission of rejected fields: only what the upstream has rejected is omitted."""

import json
import logging
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.responses.unsupported_fields import UnsupportedFields, find_rejected_field
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import Message, Reasoning
from antiphon.stream.deltas import Finish
from support.responses_backend import collect_deltas, open_backend, read_recording
from support.upstream_server import Reply, json_of, serve, stream_of

ENCRYPTED = "reasoning.encrypted_content"
HELLO = Message("user", "hi")
VALID, STALE = Reasoning([], encrypted_content="valid"), Reasoning([], encrypted_content="stale")
NO_EFFORT = "Unsupported parameter: 'reasoning.effort' is not supported with this model."
NO_ENCRYPTION = "Encrypted content is not supported with this model."
NO_ITEMS = (
    "Reasoning input items can only be provided to a reasoning or computer use model. "
    "Remove reasoning items from your input and try again."
)
UNVERIFIED = "The encrypted content gAAA...DQ== could not be verified."


def reject(message: str, *, param: str | None = None, code: str | None = None) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json_of({"error": error}, 400)


ANSWER = stream_of(read_recording("text"))


def make_turn(*items: Any, **fields: Any) -> Turn:
    body = {"model": "m", "input": "unread"} | fields
    return Turn(request=codec.decode_request(json.dumps(body).encode()).body, items=[HELLO, *items])


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (InvalidRequest(UNVERIFIED, code="invalid_encrypted_content"), "encrypted_content"),
        (InvalidRequest("The encrypted content could not be decrypted or parsed."), "encrypted_content"),
        (InvalidRequest(NO_ENCRYPTION, param="include"), "include"),
        (InvalidRequest(NO_ENCRYPTION), "include"),
        (InvalidRequest(f"Invalid value: '{ENCRYPTED}'.", param="include[0]", code="invalid_value"), "include"),
        (InvalidRequest(NO_ITEMS, param="input"), "reasoning_items"),
        (InvalidRequest(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter"), "reasoning"),
        (InvalidRequest(NO_EFFORT), "reasoning"),
        (InvalidRequest("Unrecognized request argument supplied: reasoning"), "reasoning"),
        (InvalidRequest("reasoning: Extra inputs are not permitted", param="reasoning"), "reasoning"),
        (InvalidRequest("No.", param="reasoning.summary", code="unsupported_parameter"), "reasoning.summary"),
        (InvalidRequest("'minimal' is not supported. Supported values are: 'low'.", param="reasoning.effort"), None),
        (InvalidRequest("Unsupported value: 'auto'.", param="reasoning.summary", code="unsupported_value"), None),
        (InvalidRequest("Tools are not supported with reasoning.effort 'minimal'.", param="tools"), None),
        (InvalidRequest("Tools are not supported with reasoning.effort 'minimal'."), None),
        (InvalidRequest("Unsupported parameter: 'top_p'.", param="top_p", code="unsupported_parameter"), None),
        (InvalidRequest(f"Invalid name: '{NO_EFFORT} {NO_ITEMS}'"), None),
        (InvalidRequest(f"Invalid name: '{NO_ENCRYPTION}'", param="tools[0].name"), None),
        (InvalidRequest("Invalid value: 'x'.", param="include[0]", code="invalid_value"), None),
    ],
)
def test_rejected_field_is_found_in_error(error: InvalidRequest, field: str | None) -> None:
    assert find_rejected_field(error) == field


def test_turn_is_unchanged_without_rejections() -> None:
    turn = make_turn(VALID, reasoning={"effort": "low"})
    assert UnsupportedFields().strip(turn).turn is turn


def test_rejection_of_unsent_field_is_not_recorded() -> None:
    unsupported = UnsupportedFields()
    sent = unsupported.strip(make_turn())
    for message in (NO_EFFORT, NO_ENCRYPTION, NO_ITEMS, UNVERIFIED):
        assert unsupported.record(InvalidRequest(message), sent) is None


def test_oldest_rejections_are_evicted() -> None:
    unsupported = UnsupportedFields(max_rejections=2)
    for model in "abc":
        unsupported.record(
            InvalidRequest(NO_EFFORT), unsupported.strip(make_turn(model=model, reasoning={"effort": "low"}))
        )
    assert [unsupported.is_supported(model, "reasoning") for model in "abc"] == [True, False, False]


async def test_undecryptable_reasoning_is_omitted_and_later_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejection = reject(UNVERIFIED, code="invalid_encrypted_content")
    async with serve([rejection, ANSWER, ANSWER]) as upstream, open_backend(upstream.url) as backend:
        with caplog.at_level(logging.WARNING):
            assert (await collect_deltas(backend, make_turn(STALE)))[-1] == Finish()
        assert (await collect_deltas(backend, make_turn(STALE, VALID)))[-1] == Finish()
        sent = [[item.get("encrypted_content") for item in each.json["input"]] for each in upstream.requests]
    assert sent == [[None, "stale"], [None], [None, "valid"]]
    assert "backend up: the upstream cannot decrypt earlier reasoning" in caplog.text


async def test_rejection_in_the_stream_is_retried() -> None:
    failed = {"type": "response.failed", "response": {"error": {"code": "invalid_encrypted_content", "message": "No."}}}
    rejection = stream_of(f"data: {json.dumps(failed)}\n\n".encode())
    async with serve([rejection, ANSWER]) as upstream, open_backend(upstream.url) as backend:
        assert (await collect_deltas(backend, make_turn(STALE)))[-1] == Finish()
        assert len(upstream.requests) == 2


async def test_reasoning_items_are_omitted_for_one_model_only() -> None:
    replies = [reject(NO_ITEMS, param="input"), ANSWER, ANSWER]
    async with serve(replies) as upstream, open_backend(upstream.url, models=["m", "n"]) as backend:
        await collect_deltas(backend, make_turn(VALID))
        await collect_deltas(backend, make_turn(VALID, model="n"))
        sent = [(each.json["model"], len(each.json["input"])) for each in upstream.requests]
    assert sent == [("m", 2), ("m", 1), ("n", 2)]


async def test_rejected_reasoning_is_omitted_from_later_requests() -> None:
    replies = [reject(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter"), ANSWER, ANSWER, ANSWER]
    parameters = {"reasoning": {"effort": "high", "summary": "auto"}, "include": [ENCRYPTED]}
    async with serve(replies) as upstream, open_backend(upstream.url, models=["m", "n"]) as backend:
        list_ignored = backend.capabilities.list_ignored
        assert list_ignored is not None
        assert list_ignored(make_turn(**parameters).request, "m") == []
        for model in "mmn":
            await collect_deltas(backend, make_turn(model=model, **parameters))
        sent = [(each.json["model"], each.json.get("reasoning"), each.json["include"]) for each in upstream.requests]
        assert list_ignored(make_turn(**parameters).request, "m") == ["reasoning"]
        assert list_ignored(make_turn().request, "m") == []
    reasoning = {"effort": "high", "summary": "auto"}
    assert sent == [
        ("m", reasoning, [ENCRYPTED]),
        ("m", None, []),
        ("m", None, []),
        ("n", reasoning, [ENCRYPTED]),
    ]


async def test_several_fields_are_rejected_one_by_one() -> None:
    replies = [
        reject(NO_ENCRYPTION, param="include"),
        reject("No.", param="reasoning.summary", code="unsupported_parameter"),
        ANSWER,
    ]
    async with serve(replies) as upstream, open_backend(upstream.url) as backend:
        await collect_deltas(backend, make_turn(reasoning={"effort": "high", "summary": "auto"}, include=[ENCRYPTED]))
        sent = [(each.json["reasoning"], each.json["include"]) for each in upstream.requests]
    assert sent == [
        ({"effort": "high", "summary": "auto"}, [ENCRYPTED]),
        ({"effort": "high", "summary": "auto"}, []),
        ({"effort": "high"}, []),
    ]


async def test_reasoning_with_only_a_rejected_summary_is_omitted() -> None:
    replies = [reject("No.", param="reasoning.summary", code="unsupported_parameter"), ANSWER]
    async with serve(replies) as upstream, open_backend(upstream.url) as backend:
        await collect_deltas(backend, make_turn(reasoning={"summary": "auto"}))
        assert "reasoning" not in upstream.requests[1].json


async def test_evicted_rejection_is_not_retried_forever() -> None:
    rejection = reject(UNVERIFIED, code="invalid_encrypted_content")
    async with serve([rejection, rejection]) as upstream, open_backend(upstream.url) as backend:
        backend._unsupported = UnsupportedFields(max_rejections=1)
        with pytest.raises(InvalidRequest, match="could not be verified"):
            await backend.stream(make_turn(STALE, VALID))
        assert len(upstream.requests) == 2


async def test_repeated_rejection_of_one_field_is_raised() -> None:
    rejection = reject(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter")
    async with serve([rejection, rejection]) as upstream, open_backend(upstream.url) as backend:
        with pytest.raises(InvalidRequest, match=r"reasoning\.effort"):
            await backend.stream(make_turn(reasoning={"effort": "high"}))
        assert len(upstream.requests) == 2


async def test_undecryptable_stored_response_is_sent_whole() -> None:
    next_turn = make_turn(STALE, Message("assistant", "Hello wörld"), HELLO)
    rejection = reject(UNVERIFIED, code="invalid_encrypted_content")
    async with (
        serve([ANSWER, rejection, rejection, ANSWER]) as upstream,
        open_backend(upstream.url, state="upstream") as backend,
    ):
        await collect_deltas(backend, make_turn())
        await collect_deltas(backend, next_turn)
        sent = [(each.json.get("previous_response_id"), len(each.json["input"])) for each in upstream.requests]
    assert sent == [(None, 1), ("resp_up", 1), (None, 4), (None, 3)]


async def test_rejected_fields_are_omitted_from_token_counts() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    replies = [reject(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter"), ANSWER, counted]
    turn = make_turn(reasoning={"effort": "low"})
    async with serve(replies) as upstream, open_backend(upstream.url) as backend:
        await collect_deltas(backend, turn)
        assert await backend.count_tokens(turn) == 42
        assert "reasoning" not in upstream.requests[2].json
