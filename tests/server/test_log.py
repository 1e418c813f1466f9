import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from antiphon.config.settings import ApiKey, Settings
from antiphon.engine.respond.ids import Mint
from antiphon.server.log import AccessLine, JsonFormatter, LineHandler, TextFormatter, access, log_line
from support.live_server import TIMEOUT
from support.websocket_client import WebSocketClient

LINE = AccessLine(
    request_id="req_1",
    method="POST",
    path="/v1/responses",
    status=200,
    ms=1.5,
    bytes=70,
    project="default",
    model="small",
    response_id="resp_1",
    stream=True,
    warnings=["ignored: top_k"],
)


def make_record(message: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("antiphon.x", logging.INFO, __file__, 1, message, (), None)
    record.created = 1_000_000_000.5
    record.__dict__.update(extra)
    return record


def test_request_is_logged_as_text() -> None:
    assert TextFormatter().format(make_record(LINE)) == (
        "2001-09-09T01:46:40.500Z info POST /v1/responses 200 1.5ms 70B response_id=resp_1 model=small stream "
        "warnings='ignored: top_k'"
    )


def test_text_shows_the_request_id_without_a_response_and_other_projects() -> None:
    line = AccessLine("req_1", "GET", "/v1/models", 200, 1.5, 70, project="ada")
    assert TextFormatter().format(make_record(line)).endswith("70B request_id=req_1 project=ada")


def test_usual_text_line_fits_a_terminal() -> None:
    mint = Mint()
    line = AccessLine("req_" + "0" * 32, "POST", "/v1/responses", 200, 812.35, 12345, "default", "qwen3-0.6b")
    line.response_id, line.stream = mint.response_id, True
    text = TextFormatter().format(make_record(line))
    assert f"response_id=…{mint.response_id[-12:]} model" in text
    assert len(text) <= 120


def test_text_shows_the_ends_of_ids_in_the_path() -> None:
    response_id = Mint().response_id
    line = AccessLine(
        "req_" + "0" * 32, "GET", f"/v1/responses/{response_id}/input_items", 200, 812.35, 12345, "default"
    )
    line.response_id, line.model = response_id, "qwen3-0.6b"
    text = TextFormatter().format(make_record(line))
    end = response_id[-12:]
    assert f" GET /v1/responses/…{end}/input_items 200 812.35ms 12345B model=" in text
    assert len(text) <= 120
    assert json.loads(JsonFormatter().format(make_record(line)))["path"] == line.path


def test_request_is_logged_as_json() -> None:
    assert json.loads(JsonFormatter().format(make_record(LINE))) == {
        "time": "2001-09-09T01:46:40.500Z",
        "level": "info",
        "logger": "antiphon.x",
        "request_id": "req_1",
        "method": "POST",
        "path": "/v1/responses",
        "status": 200,
        "ms": 1.5,
        "bytes": 70,
        "project": "default",
        "model": "small",
        "response_id": "resp_1",
        "stream": True,
        "warnings": ["ignored: top_k"],
    }


class Collector(logging.Handler):
    """Collects access lines. The server writes a line only after it has sent the response."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: SimpleQueue[AccessLine] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, AccessLine)
        self._lines.put(record.msg)

    def find(self, request_id: str) -> AccessLine:
        """Return the line of this request. Lines of earlier requests may come first."""
        while (line := self._lines.get(timeout=TIMEOUT)).request_id != request_id:
            pass
        return line


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [
        ({"input": "fail at once"}, 500),
        ({"input": "fail later"}, 200),
        ({"input": "fail at once", "stream": True}, 200),
        ({"input": "fail later", "stream": True}, 200),
    ],
)
def test_failed_response_is_logged_with_its_code(
    server: Any, request_fields: dict[str, Any], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    collector = Collector()
    access.addHandler(collector)
    try:
        answer = server.ask("POST", "/v1/responses", {"model": "scripted", **request_fields})
        line = collector.find(answer.headers["x-request-id"])
    finally:
        access.removeHandler(collector)
    assert (line.status, line.error) == (status, "model_error")


def test_json_line_has_the_id_of_the_key(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.access")
    running = serve(api_keys=(ApiKey("sk-ada", "a", id="laptop"), ApiKey("sk-bob", "b")))
    collector = Collector()
    access.addHandler(collector)
    try:
        answer = running.ask("GET", "/v1/models", headers={"Authorization": "Bearer sk-ada"})
        over_http = collector.find(answer.headers["x-request-id"])
        with WebSocketClient(running, key="sk-bob") as client:
            client.create()
            while client.next()["type"] != "response.completed":
                pass
            assert client.socket.response is not None
            over_websocket = collector.find(client.socket.response.headers["x-request-id"])
    finally:
        access.removeHandler(collector)
    lines = [json.loads(JsonFormatter().format(make_record(line))) for line in (over_http, over_websocket)]
    assert [(line["method"], line["project"], line["key_id"]) for line in lines] == [
        ("GET", "a", "laptop"),
        ("WS", "b", "settings-2"),
    ]
    assert "laptop" not in TextFormatter().format(make_record(over_http))


def test_client_cannot_forge_a_log_line_or_field() -> None:
    line = AccessLine("req_1", "GET", "/\ninfo GET / 200", 404, 1.5, 70, model="a project=b")
    assert (
        TextFormatter()
        .format(make_record(line))
        .endswith(r"info GET '/\ninfo GET / 200' 404 1.5ms 70B request_id=req_1 model='a project=b'")
    )


def test_log_record_shows_its_request_and_response_id() -> None:
    record = make_record("it failed", request_id="req_1", other="left out")
    assert TextFormatter().format(record) == "2001-09-09T01:46:40.500Z info it failed request_id=req_1"
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2001-09-09T01:46:40.500Z",
        "level": "info",
        "logger": "antiphon.x",
        "message": "it failed",
        "request_id": "req_1",
    }


def test_traceback_is_one_json_field_or_lines_of_text() -> None:
    record = make_record("it failed")
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in TextFormatter().format(record)
    assert json.loads(JsonFormatter().format(record))["exception"].endswith("ValueError: why")


PROGRAM = """
import logging, sys
from pathlib import Path
from antiphon.config.settings import Settings
from antiphon.server.log import configure_logging
configure_logging(Settings(data_dir=Path("."), store="memory:", log_level=sys.argv[1], log_format=sys.argv[2]))
logging.getLogger("antiphon.x").info("ours")
logging.getLogger("antiphon.x").warning("ours, loud")
logging.getLogger("somebody").info("theirs")
logging.getLogger("somebody").warning("theirs, loud")
"""


@pytest.mark.parametrize(
    ("level", "messages"),
    [("info", ["ours", "ours, loud", "theirs, loud"]), ("warning", ["ours, loud", "theirs, loud"])],
)
def test_settings_decide_what_is_logged(level: str, messages: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level, "json"], capture_output=True, check=True, cwd=tmp_path)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    assert ([line["message"] for line in lines], done.stdout) == (messages, b"")


def test_settings_in_a_log_line_show_no_secret() -> None:
    settings = Settings(data_dir=Path(), store="postgresql://ada:hunter2@db/x")
    assert "hunter2" not in TextFormatter().format(make_record(settings))


class CollectingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.msg)


def test_access_lines_reach_every_handler_and_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, other = io.StringIO(), CollectingHandler()
    handler = LineHandler(stream)
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(access, "_cache", {})
    monkeypatch.setattr(access, "level", logging.INFO)
    log_line(LINE)
    with monkeypatch.context() as patch:
        patch.setattr(access, "handlers", [other])
        log_line(LINE)
        patch.setattr(access, "propagate", False)
        log_line(LINE)
    for target in (access, handler):
        with monkeypatch.context() as patch:
            patch.setattr(target, "filters", [lambda record: False])
            log_line(LINE)
    with monkeypatch.context() as patch:
        patch.setattr(handler, "level", logging.WARNING)
        log_line(LINE)
    assert [json.loads(line)["path"] for line in stream.getvalue().splitlines()] == [LINE.path, LINE.path]
    assert other.lines == [LINE, LINE]
