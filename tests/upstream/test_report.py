import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.upstream.error_mapping import (
    MAX_MESSAGE_LENGTH,
    ErrorReport,
    decode_json_or_text,
    is_error_payload,
    parse_error_body,
    parse_error_payload,
)


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
        (b'{"error":{"message":"' + b"x" * 9000 + b'"}}', ErrorReport(message="x" * MAX_MESSAGE_LENGTH + "…")),
        (b'{"error":{"message":"a\\u0000\\u001bb\\nc","code":"two words"}}', ErrorReport(message="a b c")),
    ],
)
def test_an_error_is_read_in_any_of_the_usual_shapes(body: bytes, report: ErrorReport) -> None:
    assert parse_error_body(body) == report


@pytest.mark.parametrize("piece", [b"<script", b"<title", b"<head>", b"<!--", b"<", b"a.1.", b"[:", b"sk-"])
def test_a_page_that_was_made_to_take_long_does_not(piece: bytes) -> None:
    began = time.process_time()
    parse_error_body(b"<html>" + piece * 40_000)
    assert time.process_time() - began < 10


@given(st.binary(max_size=200))
def test_any_body_can_be_read(body: bytes) -> None:
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
def test_any_payload_can_be_read(payload: Any) -> None:
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
def test_an_error_in_a_good_answer_is_told_from_an_answer(payload: Any, expected: bool) -> None:
    assert is_error_payload(payload) is expected


@pytest.mark.parametrize(
    ("data", "decoded"),
    [(b'{"error": "No."}', {"error": "No."}), (b"No.", "No."), (b"\xffNo.", "\ufffdNo."), (b"[" * 9000, "[" * 9000)],
    ids=["JSON", "text", "half a character", "nested too deeply"],
)
def test_what_stands_in_place_of_an_error_is_json_or_the_text_as_it_is(data: bytes, decoded: Any) -> None:
    assert decode_json_or_text(data) == decoded
