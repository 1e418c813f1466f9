import json
from typing import Any

import pytest

from antiphon.errors import ModelNotFound
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response, ResponseError
from antiphon.server.failure import describe, describe_failed

ERROR = ResponseError(code="model_error", message="It broke.", type="model_error")


def make_response(**changes: Any) -> Response:
    return Response(**{"id": "resp_1", "created_at": 1, "model": "m"} | changes)


def test_all_four_keys_are_there() -> None:
    assert json.loads(describe(ModelNotFound("No."))) == {
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
def test_a_failed_response_without_output_is_an_error(error: ResponseError | None, body: dict[str, object]) -> None:
    described = describe_failed(make_response(status="failed", error=error))
    assert described is not None
    assert json.loads(described) == {"error": body}


@pytest.mark.parametrize(
    "response",
    [
        make_response(status="completed"),
        make_response(status="incomplete"),
        make_response(status="failed", error=ERROR, output=[Message(role="assistant", content="So")]),
    ],
)
def test_every_other_response_is_an_answer(response: Response) -> None:
    assert describe_failed(response) is None
