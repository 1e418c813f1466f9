from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.base import Model
from antiphon.backends.scripted.backend import ScriptedBackend
from antiphon.backends.scripted.script import Script
from support.live_server import LiveServer, make_settings


def test_models_are_listed(server: Any) -> None:
    assert server.ask("GET", "/v1/models").json == {
        "data": [
            {"id": "scripted", "created": 0, "owned_by": "scripted", "object": "model"},
            {"id": "family/member", "created": 0, "owned_by": "scripted", "object": "model"},
        ],
        "object": "list",
    }


class Windowed(ScriptedBackend):
    def models(self) -> Sequence[Model]:
        return [msgspec.structs.replace(model, context_window=4096) for model in super().models()]


def test_known_context_window_is_listed() -> None:
    running = LiveServer({}, make_settings(), backend=Windowed("scripted", Script()))
    try:
        assert running.ask("GET", "/v1/models/scripted").json == {
            "id": "scripted",
            "created": 0,
            "owned_by": "scripted",
            "object": "model",
            "context_window": 4096,
        }
    finally:
        running.stop()


def test_sdk_finds_a_model_with_a_slash_in_its_name(server: Any) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["scripted", "family/member"]
        assert client.models.retrieve("family/member").owned_by == "scripted"


def test_unknown_model_is_not_found(server: Any) -> None:
    answer = server.ask("GET", "/v1/models/nobody")
    assert (answer.status, answer.json) == (
        404,
        {
            "error": {
                "message": "The model 'nobody' does not exist.",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        },
    )
