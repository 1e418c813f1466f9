"""Errors of other servers: parsing and classification."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PreviousResponseNotFound,
    QuotaExceeded,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.upstream.error_mapping import (
    MAX_MESSAGE_LENGTH,
    ErrorReport,
    decode_json_or_text,
    is_error_payload,
    map_api_error,
    map_error_payload,
    map_error_response,
    parse_error_body,
    parse_error_payload,
    parse_wait,
)


def summarize(error: AntiphonError) -> tuple[type, str | None, str | None]:
    return type(error), error.code, error.param


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"message": "No.", "param": "x", "code": "invalid_value"}, (InvalidRequest, "invalid_value", "x")),
        (422, {"message": "No."}, (InvalidRequest, None, None)),
        (401, {"message": "No."}, (UpstreamError, "upstream_authentication", None)),
        (403, {"message": "No."}, (UpstreamError, "upstream_authentication", None)),
        (402, {"message": "No."}, (QuotaExceeded, "insufficient_quota", None)),
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
        (429, {"message": "No.", "code": "insufficient_quota"}, (QuotaExceeded, "insufficient_quota", None)),
        (429, {"message": "No.", "type": "insufficient_quota"}, (QuotaExceeded, "insufficient_quota", None)),
        (500, {"message": "No."}, (UpstreamError, "upstream_error", None)),
        (502, {"message": "No."}, (UpstreamError, "upstream_error", None)),
        (503, {"message": "No."}, (Unavailable, "upstream_overloaded", None)),
        (504, {"message": "No."}, (UpstreamTimeout, "upstream_timeout", None)),
        (529, {"message": "No.", "type": "overloaded_error"}, (Unavailable, "upstream_overloaded", None)),
        (307, {}, (UpstreamError, "upstream_refused", None)),
    ],
)
def test_status_and_body_select_the_error_class(status: int, error: Any, expected: Any) -> None:
    mapped = map_error_response(status, json.dumps({"error": error}).encode())
    assert summarize(mapped) == expected
    assert error.get("message", "") in mapped.message


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "This model's maximum context length is 8 tokens. However, your messages resulted in 9."}),
        (400, {"message": "Too many.", "code": "context_length_exceeded"}),
        (400, {"message": "Too many.", "code": "context_length_exceeded", "param": "messages"}),
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
def test_context_length_errors_are_recognised(status: int, error: Any) -> None:
    mapped = map_error_response(status, json.dumps({"error": error}).encode())
    assert summarize(mapped) == (ContextLengthExceeded, "context_length_exceeded", "input")
    assert mapped.message == error["message"]


@pytest.mark.parametrize(
    "message",
    ["max_tokens is too large: 9. This model supports at most 8 completion tokens.", "Invalid context: try again."],
)
def test_other_errors_are_not_context_length_errors(message: str) -> None:
    assert summarize(map_error_response(400, json.dumps({"error": {"message": message}}).encode()))[0] is InvalidRequest


@pytest.mark.parametrize(
    ("payload", "expected"),
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
def test_stream_error_is_mapped_without_status(payload: Any, expected: Any) -> None:
    mapped = map_error_payload(payload)
    assert summarize(mapped) == expected
    assert "No." in mapped.message


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[]", b"<html></html>", b"\xff\xfe"])
def test_error_without_message_gets_one(body: bytes) -> None:
    errors = [map_error_response(status, body) for status in range(300, 600)]
    assert [error for error in errors if len(error.message) < 20 or error.status < 400] == []


def test_retry_after_header_overrides_message() -> None:
    body = b'{"error":{"message":"Please try again in 5s."}}'
    assert map_error_response(429, body).retry_after == 5
    assert map_error_response(429, body, retry_after=2).retry_after == 2
    assert map_error_response(503, b"", retry_after=3).retry_after == 3


@pytest.mark.parametrize("header", [1e300, None])
def test_retry_after_is_at_most_a_year(header: float | None) -> None:
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
def test_wait_is_parsed_from_message(message: str, seconds: float | None) -> None:
    assert parse_wait(message) == (seconds if seconds is None else pytest.approx(seconds))


def test_secrets_are_redacted_in_message_and_param() -> None:
    body = {"error": {"message": "Key abcd1234 at http://10.0.0.1:80/v1.", "param": "abcd1234", "code": "abcd1234"}}
    mapped = map_error_response(400, json.dumps(body).encode(), secrets=["abcd1234"])
    assert (mapped.message, mapped.param, mapped.code) == ("Key *** at [URL]", "***", "***")


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (
            b'{"error":{"message":"No.","type":"t","param":"p","code":"c"}}',
            ErrorReport(message="No.", type="t", param="p", code="c"),
        ),
        (b'{"error":{"message":"No.","type":null,"param":null,"code":null}}', ErrorReport(message="No.")),
        (b'{"error":"No."}', ErrorReport(message="No.")),
        (b'{"error":"No.","error_type":"validation"}', ErrorReport(message="No.", type="validation")),
        (b'{"detail":"No."}', ErrorReport(message="No.")),
        (b'{"detail":{"error":{"message":"No."}}}', ErrorReport(message="No.")),
        (
            b'{"detail":[{"loc":["body","messages",0],"msg":"Field required"},{"loc":["body"],"msg":"bad"}]}',
            ErrorReport(message="messages.0: Field required; : bad", param="messages.0"),
        ),
        (
            b'{"object":"error","message":"No.","type":"NotFoundError","param":null,"code":404}',
            ErrorReport(message="No.", type="NotFoundError", status=404),
        ),
        (
            b'{"type":"error","error":{"type":"api_error","message":"No."},"request_id":"req_1"}',
            ErrorReport(message="No.", type="api_error"),
        ),
        (
            b'[{"error":{"code":400,"message":"No.","status":"INVALID_ARGUMENT"}}]',
            ErrorReport(message="No.", type="invalid_argument", status=400),
        ),
        (
            b'{"error":{"message":"Provider failed","code":429,"metadata":{"raw":"{\\"error\\":\\"Slow.\\"}"}}}',
            ErrorReport(message="Slow.", status=429),
        ),
        (b'{"message":"No."}', ErrorReport(message="No.")),
        (
            b"<html><head><title>502 Bad\n Gateway</title></head><body>x</body></html>",
            ErrorReport(message="502 Bad Gateway"),
        ),
        (b"<html><body><script>x</script><h1>Not &amp; here</h1></body></html>", ErrorReport(message="Not & here")),
        (b"404 page not found\n", ErrorReport(message="404 page not found")),
        (b"", ErrorReport()),
        (b'{"error":{"message":"' + b"x" * 9000 + b'"}}', ErrorReport(message="x" * 3 * MAX_MESSAGE_LENGTH)),
        (b'{"error":{"message":"a\\u0000\\u001bb\\nc","code":"two words"}}', ErrorReport(message="a b c")),
    ],
)
def test_error_formats_are_parsed(body: bytes, report: ErrorReport) -> None:
    assert parse_error_body(body) == report


@pytest.mark.parametrize("piece", [b"<script", b"<title", b"<head>", b"<!--", b"<", b"a.1.", b"[:", b"sk-"])
def test_hostile_page_is_parsed_quickly(piece: bytes) -> None:
    began = time.process_time()
    parse_error_body(b"<html>" + piece * 40_000)
    assert time.process_time() - began < 10


@given(st.binary(max_size=200))
def test_any_error_body_is_parsed(body: bytes) -> None:
    assert isinstance(parse_error_body(body).message, str)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["error", "message", "detail", "code", "type", "param", "metadata", "raw", "loc", "msg"]
                ),
                inner,
            )
        ),
        max_leaves=12,
    )
)
def test_any_error_payload_is_parsed(payload: Any) -> None:
    assert isinstance(parse_error_payload(payload).message, str)
    assert is_error_payload(payload) in (True, False)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"error": {"message": "No."}}, True),
        ({"error": "No."}, True),
        ([{"error": {"message": "No."}}], True),
        ({"object": "error", "message": "No."}, True),
        ({"type": "error", "error": {}}, True),
        ({"choices": []}, False),
        ({"error": None, "output": []}, False),
        ({"error": {"code": "x", "message": "No."}, "output": [], "status": "failed"}, False),
        ({}, False),
        ([], False),
        ("text", False),
    ],
)
def test_error_payload_is_distinguished_from_answer(payload: Any, expected: bool) -> None:
    assert is_error_payload(payload) is expected


@pytest.mark.parametrize(
    ("data", "decoded"),
    [(b'{"error": "No."}', {"error": "No."}), (b"No.", "No."), (b"\xffNo.", "\ufffdNo."), (b"[" * 9000, "[" * 9000)],
    ids=["JSON", "text", "half a character", "nested too deeply"],
)
def test_error_data_is_decoded_as_json_or_text(data: bytes, decoded: Any) -> None:
    assert decode_json_or_text(data) == decoded


def test_long_messages_are_cut() -> None:
    error = map_error_response(400, json.dumps({"error": {"message": "x" * 9000}}).encode())
    assert error.message == "x" * MAX_MESSAGE_LENGTH + "…"
    assert map_api_error(400, {"error": {"message": "x" * 9000}}).message == error.message
