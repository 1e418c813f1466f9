from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.protocol.content import OutputText
from antiphon.protocol.events import Completed, OutputTextDelta
from antiphon.protocol.items import Message, Reasoning
from antiphon.protocol.response import Response
from support import openresponses

needs_document = pytest.mark.skipif(not openresponses.available(), reason="the document is not beside the repository")


def completed(**message: Any) -> Any:
    output = [Message("assistant", [OutputText("hi")], id="msg_1", status="completed"), Reasoning(id="rs_1")]
    response = Response(id="resp_1", created_at=1, model="m", output=output)
    event = msgspec.to_builtins(Completed(1, response))
    event["response"]["output"][0].update(message)
    return event


@needs_document
def test_valid_objects_are_accepted() -> None:
    openresponses.validate_event(completed())
    openresponses.validate_response(completed()["response"])
    openresponses.validate_event(msgspec.to_builtins(OutputTextDelta(1, "msg_1", 0, 0, "hi")))


@needs_document
@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"phase": None}, "$.response.output[0].phase: None is not of type 'string'"),
        ({"type": "acme:x"}, "$.response.output[0].type: 'acme:x' is not one of ['message', "),
        ({"id": 1}, "$.response.output[0].id: 1 is not of type 'string'"),
        (
            {"content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": None}]},
            "$.response.output[0].content[0].logprobs: None is not of type 'array'",
        ),
    ],
)
def test_invalid_field_is_reported_with_path(message: Any, error: str) -> None:
    with pytest.raises(openresponses.NotOpenResponses) as caught:
        openresponses.validate_event(completed(**message))
    assert str(caught.value).startswith(f"ResponseCompletedStreamingEvent: {error}")


@needs_document
def test_missing_field_is_reported() -> None:
    response = completed()["response"]
    del response["store"]
    with pytest.raises(openresponses.NotOpenResponses, match="'store' is a required property"):
        openresponses.validate_response(response)


@needs_document
@pytest.mark.parametrize("event", [{}, {"type": "response.acme"}, {"type": "response.reasoning_text.delta"}])
def test_event_outside_open_responses_is_rejected(event: Any) -> None:
    with pytest.raises(openresponses.NotOpenResponses, match="no event has the type"):
        openresponses.validate_event(event)


def test_missing_document_skips_checks_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(openresponses, "DOCUMENT", tmp_path / "absent.json")
        openresponses.forget()
        openresponses.validate_response({})
        openresponses.validate_event({"type": "response.acme"})
        assert openresponses.event_schemas() == {}
    openresponses.forget()
    assert capsys.readouterr().err == "absent.json not found: nothing is checked against Open Responses\n"
