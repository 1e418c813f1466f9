"""Every status that a response can come to, and why it is incomplete."""

from collections.abc import Callable
from typing import Any

import pytest

from behaviour.wire import ask, get
from manifest import names

GATED = {"default": [{"text": "first "}, {"wait": "gate"}, {"text": "last"}]}


def begin(running: Any) -> dict[str, Any]:
    """A background response whose model is at work, as it was when it was created."""
    queued = ask(running, "hi", background=True)
    running.wait_for(lambda: running.backend.reached("gate"))
    return queued


def cancel(running: Any, response: dict[str, Any]) -> dict[str, Any]:
    cancelled: dict[str, Any] = running.ask("POST", f"/v1/responses/{response['id']}/cancel").json
    return cancelled


def reach(name: str, server: Any, serve: Callable[..., Any]) -> dict[str, Any]:
    """A response with this status."""
    match name:
        case "completed" | "failed" | "incomplete":
            return ask(server, {"completed": "hi", "failed": "fail", "incomplete": "long"}[name])
        case "queued":
            return ask(server, "hi", background=True)
        case _:
            running = serve(GATED)
            queued = begin(running)
            found = get(running, f"/responses/{queued['id']}")
            ended = cancel(running, queued)
            return found if name == "in_progress" else ended


@pytest.mark.parametrize("name", names("statuses"))
def test_a_response_comes_to_it(server: Any, serve: Callable[..., Any], name: str) -> None:
    response = reach(name, server, serve)
    assert response["status"] == name
    told = {key: response[key] is not None for key in ("completed_at", "error", "incomplete_details")}
    assert told == {
        "completed_at": name == "completed",
        "error": name == "failed",
        "incomplete_details": name == "incomplete",
    }


# To be steered takes a connection that stays open.
@pytest.mark.parametrize("name", [name for name in names("reasons", "implemented") if name != "steered"])
def test_an_incomplete_response_says_why(server: Any, name: str) -> None:
    response = ask(server, {"max_output_tokens": "long", "content_filter": "filter"}[name])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": name})
