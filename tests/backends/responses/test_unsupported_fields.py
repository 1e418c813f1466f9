"""What the upstream does not take is left out, once it has said so, and only that."""

import json
import logging
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.responses.unsupported_fields import Refusals, find_fault
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import Message, Reasoning
from antiphon.stream.deltas import Finish
from backends.responses.test_backend import listen, recorded, running
from support.upstream_server import Reply, json_of, serve, stream_of

ENCRYPTED = "reasoning.encrypted_content"
HELLO = Message("user", "hi")
KEPT, STALE = Reasoning([], encrypted_content="kept"), Reasoning([], encrypted_content="stale")
NO_EFFORT = "Unsupported parameter: 'reasoning.effort' is not supported with this model."
NO_SEALS = "Encrypted content is not supported with this model."
NO_ITEMS = (
    "Reasoning input items can only be provided to a reasoning or computer use model. "
    "Remove reasoning items from your input and try again."
)
UNVERIFIED = "The encrypted content gAAA...DQ== could not be verified."


def refusal(message: str, *, param: str | None = None, code: str | None = None) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json_of({"error": error}, 400)


ANSWER = stream_of(recorded("text"))


def make_turn(*items: Any, **fields: Any) -> Turn:
    body = {"model": "m", "input": "unread"} | fields
    return Turn(request=codec.decode_request(json.dumps(body).encode()).request, items=[HELLO, *items])


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (InvalidRequest(UNVERIFIED, code="invalid_encrypted_content"), "seals"),
        (InvalidRequest("The encrypted content could not be decrypted or parsed."), "seals"),
        (InvalidRequest(NO_SEALS, param="include"), "include"),
        (InvalidRequest(NO_SEALS), "include"),
        (InvalidRequest(f"Invalid value: '{ENCRYPTED}'.", param="include[0]", code="invalid_value"), "include"),
        (InvalidRequest(NO_ITEMS, param="input"), "items"),
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
        (InvalidRequest(f"Invalid name: '{NO_SEALS}'", param="tools[0].name"), None),
        (InvalidRequest("Invalid value: 'x'.", param="include[0]", code="invalid_value"), None),
    ],
)
def test_a_refusal_tells_what_it_is_about(error: InvalidRequest, fault: str | None) -> None:
    assert find_fault(error) == fault


def test_nothing_is_left_out_that_was_not_refused() -> None:
    turn = make_turn(KEPT, reasoning={"effort": "low"})
    assert Refusals().strip(turn).turn is turn


def test_a_refusal_of_what_was_not_sent_is_none_to_learn_from() -> None:
    refusals = Refusals()
    sent = refusals.strip(make_turn())
    for message in (NO_EFFORT, NO_SEALS, NO_ITEMS, UNVERIFIED):
        assert refusals.learn(InvalidRequest(message), sent) is None


def test_only_the_last_refusals_are_known() -> None:
    refusals = Refusals(most=2)
    for model in "abc":
        refusals.learn(InvalidRequest(NO_EFFORT), refusals.strip(make_turn(model=model, reasoning={"effort": "low"})))
    assert [refusals.takes(model, "reasoning") for model in "abc"] == [True, False, False]


async def test_reasoning_that_cannot_be_decrypted_any_more_is_left_out_and_what_comes_after_it_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = refusal(UNVERIFIED, code="invalid_encrypted_content")
    async with serve([refused, ANSWER, ANSWER]) as upstream, running(upstream.url) as backend:
        with caplog.at_level(logging.WARNING):
            assert (await listen(backend, make_turn(STALE)))[-1] == Finish()
        assert (await listen(backend, make_turn(STALE, KEPT)))[-1] == Finish()
        sent = [[item.get("encrypted_content") for item in each.json["input"]] for each in upstream.requests]
    assert sent == [[None, "stale"], [None], [None, "kept"]]
    assert "backend up: earlier reasoning cannot be decrypted there any more" in caplog.text


async def test_it_is_asked_again_too_if_the_stream_says_so() -> None:
    failed = {"type": "response.failed", "response": {"error": {"code": "invalid_encrypted_content", "message": "No."}}}
    refused = stream_of(f"data: {json.dumps(failed)}\n\n".encode())
    async with serve([refused, ANSWER]) as upstream, running(upstream.url) as backend:
        assert (await listen(backend, make_turn(STALE)))[-1] == Finish()
        assert len(upstream.requests) == 2


async def test_a_model_that_takes_no_earlier_reasoning_gets_none_and_others_do() -> None:
    replies = [refusal(NO_ITEMS, param="input"), ANSWER, ANSWER]
    async with serve(replies) as upstream, running(upstream.url, models=["m", "n"]) as backend:
        await listen(backend, make_turn(KEPT))
        await listen(backend, make_turn(KEPT, model="n"))
        sent = [(each.json["model"], len(each.json["input"])) for each in upstream.requests]
    assert sent == [("m", 2), ("m", 1), ("n", 2)]


async def test_a_model_that_does_not_reason_is_asked_to_only_once() -> None:
    replies = [refusal(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter"), ANSWER, ANSWER, ANSWER]
    asked = {"reasoning": {"effort": "high", "summary": "auto"}, "include": [ENCRYPTED]}
    async with serve(replies) as upstream, running(upstream.url, models=["m", "n"]) as backend:
        list_ignored = backend.capabilities.list_ignored
        assert list_ignored is not None
        assert list_ignored(make_turn(**asked).request, "m") == []
        for model in "mmn":
            await listen(backend, make_turn(model=model, **asked))
        sent = [(each.json["model"], each.json.get("reasoning"), each.json["include"]) for each in upstream.requests]
        assert list_ignored(make_turn(**asked).request, "m") == ["reasoning"]
        assert list_ignored(make_turn().request, "m") == []
    reasoning = {"effort": "high", "summary": "auto"}
    assert sent == [
        ("m", reasoning, [ENCRYPTED]),
        ("m", None, []),
        ("m", None, []),
        ("n", reasoning, [ENCRYPTED]),
    ]


async def test_one_after_the_other_may_be_refused() -> None:
    replies = [
        refusal(NO_SEALS, param="include"),
        refusal("No.", param="reasoning.summary", code="unsupported_parameter"),
        ANSWER,
    ]
    async with serve(replies) as upstream, running(upstream.url) as backend:
        await listen(backend, make_turn(reasoning={"effort": "high", "summary": "auto"}, include=[ENCRYPTED]))
        sent = [(each.json["reasoning"], each.json["include"]) for each in upstream.requests]
    assert sent == [
        ({"effort": "high", "summary": "auto"}, [ENCRYPTED]),
        ({"effort": "high", "summary": "auto"}, []),
        ({"effort": "high"}, []),
    ]


async def test_a_summary_that_is_all_that_is_asked_for_takes_the_whole_with_it() -> None:
    replies = [refusal("No.", param="reasoning.summary", code="unsupported_parameter"), ANSWER]
    async with serve(replies) as upstream, running(upstream.url) as backend:
        await listen(backend, make_turn(reasoning={"summary": "auto"}))
        assert "reasoning" not in upstream.requests[1].json


async def test_what_cannot_be_remembered_is_not_asked_for_ever() -> None:
    refused = refusal(UNVERIFIED, code="invalid_encrypted_content")
    async with serve([refused, refused]) as upstream, running(upstream.url) as backend:
        backend._refusals = Refusals(most=1)
        with pytest.raises(InvalidRequest, match="could not be verified"):
            await backend.stream(make_turn(STALE, KEPT))
        assert len(upstream.requests) == 2


async def test_an_upstream_that_insists_is_believed() -> None:
    refused = refusal(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter")
    async with serve([refused, refused]) as upstream, running(upstream.url) as backend:
        with pytest.raises(InvalidRequest, match=r"reasoning\.effort"):
            await backend.stream(make_turn(reasoning={"effort": "high"}))
        assert len(upstream.requests) == 2


async def test_what_the_upstream_has_kept_and_cannot_decrypt_is_sent_whole_and_then_without() -> None:
    answered = make_turn(STALE, Message("assistant", "Hello wörld"), HELLO)
    refused = refusal(UNVERIFIED, code="invalid_encrypted_content")
    async with (
        serve([ANSWER, refused, refused, ANSWER]) as upstream,
        running(upstream.url, state="upstream") as backend,
    ):
        await listen(backend, make_turn())
        await listen(backend, answered)
        sent = [(each.json.get("previous_response_id"), len(each.json["input"])) for each in upstream.requests]
    assert sent == [(None, 1), ("resp_up", 1), (None, 4), (None, 3)]


async def test_tokens_are_counted_without_it_too() -> None:
    counted = json_of({"object": "response.input_tokens", "input_tokens": 42})
    replies = [refusal(NO_EFFORT, param="reasoning.effort", code="unsupported_parameter"), ANSWER, counted]
    turn = make_turn(reasoning={"effort": "low"})
    async with serve(replies) as upstream, running(upstream.url) as backend:
        await listen(backend, turn)
        assert await backend.count_tokens(turn) == 42
        assert "reasoning" not in upstream.requests[2].json
