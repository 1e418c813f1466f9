"""Statuses of a response, and the reasons for an incomplete one."""

from collections.abc import Callable
from typing import Any

import pytest

from behaviour.wire import ask, get
from manifest import names

GATED = {"default": [{"text": "first "}, {"wait": "gate"}, {"text": "last"}]}


def start_background(running: Any) -> dict[str, Any]:
    """Start a background response, wait until its model runs, and return the response as it was created."""
    queued = ask(running, "hi", background=True)
    running.wait_for(lambda: running.backend.reached("gate"))
    return queued


def cancel(running: Any, response: dict[str, Any]) -> dict[str, Any]:
    cancelled: dict[str, Any] = running.ask("POST", f"/v1/responses/{response['id']}/cancel").json
    return cancelled


def make_response(name: str, server: Any, serve: Callable[..., Any]) -> dict[str, Any]:
    """Return a response with this status."""
    match name:
        case "completed" | "failed" | "incomplete":
            return ask(server, {"completed": "hi", "failed": "fail", "incomplete": "long"}[name])
        case "queued":
            return ask(server, "hi", background=True)
        case _:
            running = serve(GATED)
            queued = start_background(running)
            found = get(running, f"/responses/{queued['id']}")
            ended = cancel(running, queued)
            return found if name == "in_progress" else ended


@pytest.mark.parametrize("name", names("statuses"))
def test_response_reaches_the_status(server: Any, serve: Callable[..., Any], name: str) -> None:
    response = make_response(name, server, serve)
    assert response["status"] == name
    is_set = {key: response[key] is not None for key in ("completed_at", "error", "incomplete_details")}
    assert is_set == {
        "completed_at": name == "completed",
        "error": name == "failed",
        "incomplete_details": name == "incomplete",
    }


# A steered response needs a WebSocket.
@pytest.mark.parametrize("name", [name for name in names("reasons", "implemented") if name != "steered"])
def test_incomplete_response_has_a_reason(server: Any, name: str) -> None:
    response = ask(server, {"max_output_tokens": "long", "content_filter": "filter"}[name])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": name})
