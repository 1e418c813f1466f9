import json
from typing import Any

import pytest

from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PreviousResponseNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.upstream.error_mapping import map_error_payload, map_error_response, parse_wait


def tell(error: AntiphonError) -> tuple[type, str | None, str | None]:
    return type(error), error.code, error.param


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (400, {"message": "No.", "param": "x", "code": "invalid_value"}, (InvalidRequest, "invalid_value", "x")),
        (422, {"message": "No."}, (InvalidRequest, None, None)),
        (401, {"message": "No."}, (UpstreamError, "upstream_authentication", None)),
        (403, {"message": "No."}, (UpstreamError, "upstream_authentication", None)),
        (402, {"message": "No."}, (RateLimited, "insufficient_quota", None)),
        (
            404,
            {"message": "Invalid URL (POST /v1/x)", "type": "invalid_request_error"},
            (UpstreamError, "upstream_refused", None),
        ),
        (
            404,
            {"message": "The model `m` does not exist", "code": "model_not_found"},
            (ModelNotFound, "model_not_found", "model"),
        ),
        (404, {"message": "model 'm' not found, try pulling it first"}, (ModelNotFound, "model_not_found", "model")),
        (404, {"message": "model: claude-0", "type": "not_found_error"}, (ModelNotFound, "model_not_found", "model")),
        (400, {"message": "acme/m is not a valid model ID", "code": 400}, (ModelNotFound, "model_not_found", "model")),
        (
            404,
            {"message": "Item with id 'rs_1' not found.", "type": "invalid_request_error"},
            (NotFound, "not_found", None),
        ),
        (
            400,
            {"message": "No.", "code": "previous_response_not_found", "param": "previous_response_id"},
            (PreviousResponseNotFound, "previous_response_not_found", "previous_response_id"),
        ),
        (405, {"message": "No."}, (UpstreamError, "upstream_refused", None)),
        (408, {"message": "No."}, (UpstreamTimeout, "upstream_timeout", None)),
        (409, {"message": "No."}, (UpstreamError, "upstream_error", None)),
        (413, {"message": "No.", "type": "request_too_large"}, (BodyTooLarge, "request_too_large", None)),
        (429, {"message": "No."}, (RateLimited, "rate_limit_exceeded", None)),
        (429, {"message": "No.", "code": "insufficient_quota"}, (RateLimited, "insufficient_quota", None)),
        (500, {"message": "No."}, (UpstreamError, "upstream_error", None)),
        (502, {"message": "No."}, (UpstreamError, "upstream_error", None)),
        (503, {"message": "No."}, (Unavailable, "upstream_overloaded", None)),
        (504, {"message": "No."}, (UpstreamTimeout, "upstream_timeout", None)),
        (529, {"message": "No.", "type": "overloaded_error"}, (Unavailable, "upstream_overloaded", None)),
        (307, {}, (UpstreamError, "upstream_refused", None)),
    ],
)
def test_a_status_and_its_words_are_an_error_of_ours(status: int, error: Any, told: Any) -> None:
    mapped = map_error_response(status, json.dumps({"error": error}).encode())
    assert tell(mapped) == told
    assert error.get("message", "") in mapped.message


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "This model's maximum context length is 8 tokens. However, your messages resulted in 9."}),
        (400, {"message": "Too many.", "code": "context_length_exceeded"}),
        (400, {"message": "Your input exceeds the context window of this model. Please adjust your input."}),
        (400, {"message": "The decoder prompt (length 9) is longer than the maximum model length of 8."}),
        (400, {"message": "the request exceeds the available context size, try increasing it", "code": 400}),
        (400, {"message": "x", "type": "exceed_context_size_error"}),
        (500, {"message": "the request exceeds the available context size. try increasing the context size"}),
        (400, {"message": "prompt is too long: 200001 tokens > 200000 maximum"}),
        (400, {"message": "input length and `max_tokens` exceed context limit: 9 + 1 > 8, decrease input length"}),
        (400, {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}),
        (400, {"message": "Requested token count exceeds the model's maximum context length of 8 tokens."}),
        (400, {"message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."}),
        (400, {"message": "Prompt contains 9 tokens, too large for model with 8 maximum context length"}),
        (400, {"message": "Please reduce the length of the messages or completion."}),
        (422, {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8. Given: 9"}),
        (400, {"message": "the input length exceeds the context length"}),
        (400, {"message": "Input is too long for requested model."}),
        (400, {"message": "Trying to keep the first 9 tokens when context the overflows. However, ..."}),
    ],
)
def test_a_context_that_is_too_long_is_known_in_all_wordings(status: int, error: Any) -> None:
    mapped = map_error_response(status, json.dumps({"error": error}).encode())
    assert tell(mapped) == (ContextLengthExceeded, "context_length_exceeded", "input")
    assert mapped.message == error["message"]


@pytest.mark.parametrize(
    "message",
    ["max_tokens is too large: 9. This model supports at most 8 completion tokens.", "Invalid context: try again."],
)
def test_other_refusals_are_not_taken_for_a_long_context(message: str) -> None:
    assert tell(map_error_response(400, json.dumps({"error": {"message": message}}).encode()))[0] is InvalidRequest


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"error": {"message": "No.", "type": "invalid_request_error", "param": "x"}}, (InvalidRequest, None, "x")),
        (
            {"type": "error", "error": {"type": "overloaded_error", "message": "No."}},
            (Unavailable, "upstream_overloaded", None),
        ),
        (
            {"type": "error", "error": {"type": "rate_limit_error", "message": "No."}},
            (RateLimited, "rate_limit_exceeded", None),
        ),
        (
            {"type": "error", "code": "rate_limit_exceeded", "message": "No."},
            (RateLimited, "rate_limit_exceeded", None),
        ),
        ({"error": {"message": "No.", "code": 429}}, (RateLimited, "rate_limit_exceeded", None)),
        ({"object": "error", "message": "No.", "type": "BadRequestError", "code": 400}, (InvalidRequest, None, None)),
        ({"code": "server_error", "message": "No."}, (UpstreamError, "upstream_error", None)),
        ({"error": "No."}, (UpstreamError, "upstream_error", None)),
        ("No.", (UpstreamError, "upstream_error", None)),
        ({"error": {"message": "No.", "code": "server_is_overloaded"}}, (Unavailable, "upstream_overloaded", None)),
    ],
)
def test_an_error_in_a_stream_needs_no_status(payload: Any, told: Any) -> None:
    mapped = map_error_payload(payload)
    assert tell(mapped) == told
    assert "No." in mapped.message


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[]", b"<html></html>", b"\xff\xfe"])
def test_an_error_without_words_has_some(body: bytes) -> None:
    errors = [map_error_response(status, body) for status in range(300, 600)]
    assert [error for error in errors if len(error.message) < 20 or error.status < 400] == []


def test_a_wait_in_the_headers_counts_more_than_one_in_the_words() -> None:
    body = b'{"error":{"message":"Please try again in 5s."}}'
    assert map_error_response(429, body).retry_after == 5
    assert map_error_response(429, body, retry_after=2).retry_after == 2
    assert map_error_response(503, b"", retry_after=3).retry_after == 3


@pytest.mark.parametrize("header", [1e300, None])
def test_nobody_is_told_to_wait_for_more_than_a_year(header: float | None) -> None:
    body = json.dumps({"error": {"message": f"Try again in {'9' * 400}s."}}).encode()
    assert map_error_response(429, body, retry_after=header).retry_after == 366 * 24 * 3600


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("Please try again in 1.5s.", 1.5),
        ("Please try again in 20ms. Visit us.", 0.02),
        ("Please try again in 250 milliseconds.", 0.25),
        ("Please try again in 6m0s.", 360),
        ("try again in 1h2m3.5s", 3723.5),
        ("Please retry after 30 seconds.", 30),
        ("Please retry in 36.4s.", 36.4),
        ("You have 5s left to try.", None),
        ("", None),
    ],
)
def test_a_wait_is_found_in_the_words(message: str, seconds: float | None) -> None:
    assert parse_wait(message) == (seconds if seconds is None else pytest.approx(seconds))


def test_secrets_are_taken_out_of_message_and_param() -> None:
    body = {"error": {"message": "Key abcd1234 at http://10.0.0.1:80/v1.", "param": "abcd1234", "code": "abcd1234"}}
    mapped = map_error_response(400, json.dumps(body).encode(), secrets=["abcd1234"])
    assert (mapped.message, mapped.param, mapped.code) == ("Key *** at [URL]", "***", "***")
