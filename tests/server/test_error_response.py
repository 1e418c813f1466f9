import json
from typing import Any

import pytest

from antiphon.errors import (
    AntiphonError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    QuotaExceeded,
    RateLimited,
    ServerError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol.codec import encode
from antiphon.protocol.events import Error
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response, ResponseError
from antiphon.server.error_response import encode_error_body, encode_failed_response
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Failure

ERROR = ResponseError(code="model_error", message="It broke.", type="model_error")


def make_response(**changes: Any) -> Response:
    return Response(**{"id": "resp_1", "created_at": 1, "model": "m"} | changes)


def test_error_body_has_all_four_fields() -> None:
    assert json.loads(encode_error_body(ModelNotFound("No."))) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": "model_not_found"}
    }


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (ERROR, {"message": "It broke.", "type": "model_error", "param": None, "code": "model_error"}),
        (
            ResponseError(code="x", message="It broke."),
            {"message": "It broke.", "type": "server_error", "param": None, "code": "x"},
        ),
        (None, {"message": "The response failed.", "type": "server_error", "param": None, "code": "server_error"}),
    ],
)
def test_failed_response_without_output_is_an_error(error: ResponseError | None, body: dict[str, object]) -> None:
    encoded = encode_failed_response(make_response(status="failed", error=error))
    assert encoded is not None
    status, error_body = encoded
    assert (status, json.loads(error_body)) == (500, {"error": body})


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("Later."),
        QuotaExceeded("Spent."),
        InvalidRequest("No.", param="input", code="invalid_value"),
        ContextLengthExceeded("Too long."),
        UpstreamError("It broke off."),
        UpstreamError("A wrong key.", code="upstream_authentication"),
        UpstreamTimeout("Silence."),
        Unavailable("No room."),
        Unavailable("No room there.", code="upstream_overloaded"),
        Unavailable("Left alone.", code="upstream_unavailable"),
        ModelError("Nonsense."),
        ServerError("Our fault."),
    ],
    ids=lambda error: error.code,
)
def test_failed_response_has_the_status_of_its_error(error: AntiphonError) -> None:
    failure = ResponseError(error.code or "", error.message, error.param, error.type)
    assert encode_failed_response(make_response(status="failed", error=failure)) == (
        error.status,
        encode_error_body(error),
    )


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Failure("Later.", "rate_limit_exceeded", "rate_limit_error"), 429),
        (Failure("Too long.", "context_length_exceeded", "invalid_request_error", "input"), 400),
        (Failure("Not JSON.", "invalid_output", "model_error"), 500),
        (Failure("Silence.", "upstream_timeout"), 504),
        (Failure("The server is shutting down.", "server_shutdown"), 503),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_plain_and_streamed_failure_have_the_same_error(failure: Failure, status: int) -> None:
    composer = Composer(make_response(), new_id=str, now=int)
    error, _ = composer.compose([failure])
    assert isinstance(error, Error)
    encoded = encode_failed_response(composer.response)
    assert encoded is not None
    assert (encoded[0], json.loads(encoded[1])["error"]) == (status, json.loads(encode(error))["error"])


@pytest.mark.parametrize(
    "response",
    [
        make_response(status="completed"),
        make_response(status="incomplete"),
        make_response(status="failed", error=ERROR, output=[Message(role="assistant", content="So")]),
    ],
)
def test_response_that_did_not_fail_is_no_error(response: Response) -> None:
    assert encode_failed_response(response) is None
