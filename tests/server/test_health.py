from collections.abc import Callable
from typing import Any


def test_running_server_is_live_and_ready(server: Any) -> None:
    assert (server.ask("GET", "/healthz").json, server.ask("GET", "/readyz").json) == (
        {"status": "ok"},
        {"status": "ready"},
    )


def test_server_with_closed_engine_is_live_but_not_ready(serve: Callable[..., Any]) -> None:
    running = serve()
    running.wait_for(running.engine.close)
    answer = running.ask("GET", "/readyz")
    assert (running.ask("GET", "/healthz").status, answer.status, answer.json["error"]["code"]) == (
        200,
        503,
        "server_unavailable",
    )


def test_root_lists_the_main_paths(server: Any) -> None:
    assert server.ask("GET", "/").json["responses"] == "/v1/responses"


def test_head_response_has_no_body(server: Any) -> None:
    answer = server.ask("HEAD", "/healthz")
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "15", b"")
