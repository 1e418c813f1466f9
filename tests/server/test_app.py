import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.config.settings import Settings
from antiphon.engine.engine import Engine
from antiphon.protocol.response import Response
from antiphon.server.app import App
from antiphon.server.routes import make_router
from antiphon.store.memory.store import MemoryStore
from support.live_server import make_settings


class BrokenStore(MemoryStore):
    async def open(self) -> None:
        raise RuntimeError("the disk is on fire")


class ForgetfulStore(MemoryStore):
    async def load_response(self, project: str, response_id: str) -> Response | None:
        raise RuntimeError("a secret of the inside")

    load_bare_response = load_response


def test_unexpected_error_shows_only_the_request_id(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(store=ForgetfulStore())
    answer = running.ask("GET", "/v1/responses/resp_1", headers={"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["x-request-id"], answer.json) == (
        500,
        "mine",
        {
            "error": {
                "message": "The server had an error. The request id is mine.",
                "type": "server_error",
                "param": None,
                "code": "server_error",
            }
        },
    )
    assert "a secret of the inside" in caplog.text


def test_server_continues_after_an_unexpected_error(serve: Callable[..., Any]) -> None:
    running = serve(store=ForgetfulStore())
    assert [running.ask("GET", path).status for path in ("/v1/responses/resp_1", "/healthz")] == [500, 200]


class StuckStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.is_reading = asyncio.Event()

    async def load_response(self, project: str, response_id: str) -> Response | None:
        self.is_reading.set()
        await asyncio.Event().wait()
        return None

    load_bare_response = load_response


async def test_cancelled_request_is_logged_with_the_status_of_its_response(
    make_channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    store = StuckStore()
    app = App(Engine(backends={}, store=store), make_settings())
    channel = make_channel()
    scope = {"type": "http", "method": "GET", "path": "/v1/responses/resp_1", "query_string": b"", "headers": []}
    task = asyncio.create_task(app(scope, channel.receive, channel.send))
    await store.is_reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (line,) = [record.msg for record in caplog.records if record.name == "antiphon.access"]
    assert (line.path, line.status, line.error) == ("/v1/responses/resp_1", 503, "server_unavailable")


ROUTES = make_router(Engine(backends={}, store=MemoryStore()), make_settings()).entries


@pytest.mark.parametrize("entry", ROUTES, ids=[f"{entry.method} {entry.path}" for entry in ROUTES])
def test_every_route_lists_ignored_query_parameters(server: Any, entry: Any) -> None:
    path = re.sub(r"\{[\w.]+\}", "nothing", entry.path)
    answer = server.ask(entry.method, f"{path}?mood=sunny&size=2", {} if entry.method == "POST" else None)
    assert answer.headers["x-antiphon-warnings"].split("; ")[0] == "ignored: mood, size"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/nowhere", ""),
        ("/v1", ""),
        ("/v1/embeddings", ""),
        ("/v1/responses/a/b", ""),
        ("/responses", " Did you mean /v1/responses?"),
        ("/v1/responses/", " Did you mean /v1/responses?"),
        ("//v1/responses", " Did you mean /v1/responses?"),
        ("/v1/v1/responses", " Did you mean /v1/responses?"),
        ("/responses/resp_1/cancel", " Did you mean /v1/responses/resp_1/cancel?"),
        ("/v1/chat/completions", " This server has the Responses API: POST /v1/responses."),
        ("/chat/completions", " This server has the Responses API: POST /v1/responses."),
    ],
)
def test_unknown_route_is_404(server: Any, path: str, hint: str) -> None:
    answer = server.ask("POST", path, {})
    assert (answer.status, answer.json["error"]) == (
        404,
        {
            "message": f"Unknown path: {path}.{hint}",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        },
    )


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/responses", "POST, OPTIONS, GET, HEAD"),
        ("POST", "/v1/responses/resp_1", "GET, HEAD, OPTIONS, DELETE"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
    ],
)
def test_wrong_method_is_405_with_the_allowed_methods(server: Any, method: str, path: str, allow: str) -> None:
    answer = server.ask(method, path)
    assert (answer.status, answer.headers["allow"], answer.json["error"]["code"]) == (405, allow, "method_not_allowed")


def test_every_response_has_a_request_id_and_a_duration(server: Any) -> None:
    headers = server.ask("GET", "/nowhere").headers
    assert headers["x-request-id"].startswith("req_")
    assert headers["openai-processing-ms"].isdigit()


def test_request_writes_one_log_line(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    body = {"model": "scripted", "input": "hi", "stream": True, "top_k": 1}
    answer = server.ask("POST", "/v1/responses", body, headers={"X-Request-Id": "of-one-line"})
    server.do(lambda: None)  # the log line is written in the same step of the event loop as the end of the response
    lines = [record.msg for record in caplog.records if record.name == "antiphon.access"]
    # The line of an earlier request to this server may have been late.
    (channel,) = [each for each in lines if each.request_id == "of-one-line"]
    assert (channel.request_id, channel.method, channel.path, channel.status, channel.bytes) == (
        "of-one-line",
        "POST",
        "/v1/responses",
        200,
        len(answer.body),
    )
    assert (channel.project, channel.model, channel.stream, channel.error, channel.warnings) == (
        "default",
        "scripted",
        True,
        None,
        ["ignored: top_k"],
    )
    assert channel.response_id.encode() in answer.body


async def test_engine_start_error_fails_the_lifespan(make_channel: Any, tmp_path: Any) -> None:
    channel = make_channel({"type": "lifespan.startup"})
    app = App(Engine(backends={}, store=BrokenStore()), Settings(data_dir=tmp_path, store="memory:"))
    await app({"type": "lifespan"}, channel.receive, channel.send)
    assert channel.sent == [{"type": "lifespan.startup.failed", "message": "the disk is on fire"}]
    assert str(app.startup_error) == "the disk is on fire"


async def test_engine_starts_and_closes_with_the_lifespan(make_channel: Any, tmp_path: Any) -> None:
    channel = make_channel({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    engine = Engine(backends={}, store=MemoryStore())
    app = App(engine, Settings(data_dir=tmp_path, store="memory:"))
    await app({"type": "lifespan"}, channel.receive, channel.send)
    assert channel.sent == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
    assert not engine.ready
