"""Generated requests, frames, forms, keys and settings: no 500, no hang, no secret in the log, no growth of memory.

The examples are the same in every run. ANTIPHON_TEST_EXAMPLES is their number for each test: see tests/conftest.py.
"""

import json
import socket
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from antiphon.config.loading import load
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
KEY = "sk-fuzz-0123456789abcdef"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
MAX_GROWTH_MB = 60

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
NAMES = st.sampled_from(
    [
        "model",
        "input",
        "items",
        "type",
        "role",
        "content",
        "id",
        "file_id",
        "file_ids",
        "files",
        "name",
        "metadata",
        "filters",
        "query",
        "attributes",
        "tools",
        "stream",
        "store",
        "background",
        "chunking_strategy",
        "template",
        "expires_after",
        "purpose",
        "bytes",
        "part_ids",
        "key",
        "value",
        "scopes",
    ]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)
IDS = st.text(max_size=20) | st.sampled_from(
    ["..", "../..", "%00", "%2e%2e%2f", "vs_1", "file-1", "cntr_" + "a" * 500, "resp_" + "0" * 44, "' OR 1=1 --", "%"]
)
PATHS = st.sampled_from(
    [
        "/v1/responses",
        "/v1/responses/{}",
        "/v1/responses/{}/input_items",
        "/v1/responses/{}/cancel",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        "/v1/conversations",
        "/v1/conversations/{}/items",
        "/v1/conversations/{}/items/{}",
        "/v1/prompts/{}",
        "/v1/files",
        "/v1/files/{}/content",
        "/v1/uploads",
        "/v1/uploads/{}/complete",
        "/v1/vector_stores",
        "/v1/vector_stores/{}",
        "/v1/vector_stores/{}/search",
        "/v1/vector_stores/{}/files/{}",
        "/v1/vector_stores/{}/file_batches/{}/cancel",
        "/v1/containers",
        "/v1/containers/{}/files/{}/content",
        "/v1/agent/execute",
        "/v1/organization/projects",
        "/v1/organization/usage/completions",
        "/v1/{}",
    ]
)
QUERIES = st.dictionaries(
    st.sampled_from(["limit", "after", "before", "order", "include", "stream", "starting_after", "purpose", "filter"]),
    st.text(max_size=10) | st.integers().map(str),
    max_size=3,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server for all tests of this module, which must survive them."""
    started = Victim(
        tmp_path_factory.mktemp("fuzz"),
        script={"default": "Hello."},
        api_keys=[{"key": KEY, "project": "p"}],
        body_timeout_seconds=2,
        head_timeout_seconds=2,
        write_timeout_seconds=2,
        log_level="debug",
    )
    answer = started.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers=AUTHORIZED)
    assert answer.status == 200
    started.ask("GET", "/v1/files", headers=AUTHORIZED)  # loads the modules of files
    before = started.rss_mb()
    yield started
    try:
        assert started.is_running(), started.log()
        log = started.log()
        assert "Traceback" not in log
        assert KEY not in log
        assert started.rss_mb() < before + MAX_GROWTH_MB
        assert (
            started.ask("POST", "/v1/responses", {"model": "scripted", "input": "hi"}, headers=AUTHORIZED).status == 200
        )
    finally:
        started.stop()


def exchange(server: Victim, data: bytes) -> bytes:
    """Send bytes, and return all that the server sends until it closes the connection."""
    with server.connect() as client:
        received = b""
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                received += part
        except ConnectionError:
            pass
        return received


def check_status_lines(received: bytes) -> None:
    for line in received.split(b"\r\n"):
        if line.startswith(b"HTTP/1."):
            assert line.split(b" ")[1] < b"500" or line.split(b" ")[1] == b"503", received[:500]


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PATCH", "HEAD"]),
    path=PATHS,
    ids=st.tuples(IDS, IDS),
    query=QUERIES,
    body=JSON,
)
def test_generated_json_gets_no_server_error(
    server: Victim, method: str, path: str, ids: tuple[str, str], query: dict[str, str], body: Any
) -> None:
    target = path.format(*(quote(each, safe="") for each in ids))
    if query:
        target += "?" + "&".join(f"{name}={quote(value)}" for name, value in query.items())
    answer = server.ask(method, target, json.dumps(body).encode(), headers=AUTHORIZED)
    assert answer.status < 500, (method, target, body, answer.body)


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "Expect", "Content-Type"]
        )
        | st.text(string.printable, max_size=8),
        st.sampled_from(
            [
                "localhost",
                "0",
                "5",
                "-1",
                "99999999999999999999",
                "chunked",
                "gzip, chunked",
                "close",
                "websocket",
                "100-continue",
                "h2c",
            ]
        )
        | st.text(max_size=20),
    ),
    max_size=6,
)


@FUZZ
@given(
    start=st.sampled_from(
        ["POST /v1/responses HTTP/1.1", "GET / HTTP/1.0", "GET /v1/responses HTTP/1.1", "OPTIONS * HTTP/1.1"]
    )
    | st.text(max_size=60),
    headers=HEADERS,
    body=st.binary(max_size=100)
    | st.sampled_from([b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"{}", b"ffffffffffffffff\r\n"]),
)
def test_generated_bytes_get_no_server_error(
    server: Victim, start: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = [start, *(f"{name}: {value}" for name, value in [*headers, ("Authorization", f"Bearer {KEY}")])]
    check_status_lines(exchange(server, "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body))


UPGRADE = (
    f"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()
MESSAGES = st.dictionaries(NAMES, JSON, max_size=4).map(
    lambda fields: json.dumps({"type": "response.create"} | fields).encode()
)


def make_frame(first: int, mask: bool, payload: bytes, declared: int | None) -> bytes:
    size = len(payload) if declared is None else declared
    length = bytes((size | 0x80 * mask,)) if size < 126 else bytes((127 | 0x80 * mask,)) + size.to_bytes(8)
    return bytes((first,)) + length + bytes(4 * mask) + payload


FRAMES = st.builds(
    make_frame,
    st.sampled_from([0x81, 0x82, 0x01, 0x80, 0x89, 0x88]) | st.integers(0, 255),
    st.booleans() | st.just(True),
    st.binary(max_size=130) | MESSAGES,
    st.none() | st.sampled_from([0, 125, 2**40, 2**63 - 1]),
)


@FUZZ
@given(frames=st.lists(FRAMES, min_size=1, max_size=6))
def test_generated_frames_end_without_a_server_error(server: Victim, frames: list[bytes]) -> None:
    received = exchange(server, UPGRADE + b"".join(frames))
    assert received.startswith(b"HTTP/1.1 101 ")
    assert b'"status":500' not in received


@FUZZ
@given(
    header=st.sampled_from(["Authorization", "authorization", "api-key", "X-Api-Key"]),
    value=st.text(max_size=200)
    | st.builds(
        "{} {}".format, st.sampled_from(["Bearer", "bearer", "Basic", "Bearer  ", "", "Bearer\t"]), st.text(max_size=60)
    )
    | st.sampled_from(
        [
            "Bearer " + "x" * 7000,
            KEY,
            f"Basic {KEY}",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            "Bearer",
            f"Bearer x{KEY}",
        ]
    ),
    path=st.sampled_from(["/v1/models", "/v1/files", "/v1/containers", "/v1/vector_stores", "/v1/responses/x"]),
)
def test_generated_keys_are_refused(server: Victim, header: str, value: str, path: str) -> None:
    data = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}: {value}\r\n\r\n"
    received = exchange(server, data.encode("utf-8", "surrogatepass"))
    assert received[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400", b"HTTP/1.1 431", b""), received[:300]


PART_HEADERS = st.sampled_from(
    [
        'Content-Disposition: form-data; name="purpose"',
        'Content-Disposition: form-data; name="file"; filename="a.txt"',
        "Content-Disposition: form-data; name=\"data\"; filename*=UTF-8''%ff%00",
        'Content-Disposition: form-data; name="expires_after[seconds]"',
        'Content-Disposition: form-data; name="a' + "[b]" * 2000 + '"',
        "Content-Disposition: form-data; name",
        "Content-Type: text/plain",
    ]
) | st.text(max_size=40)
PARTS = st.lists(
    st.tuples(
        st.lists(PART_HEADERS, max_size=3), st.binary(max_size=60) | st.sampled_from([b"assistants", b"user_data"])
    ),
    max_size=5,
)


@FUZZ
@given(
    path=st.sampled_from(["/v1/files", "/v1/uploads/upload_1/parts", "/v1/containers/cntr_1/files"]),
    parts=PARTS,
    end=st.sampled_from([b"--b--\r\n", b"--b\r\n", b"", b"--b--" + b"x" * 1000]),
)
def test_generated_forms_get_no_server_error(
    server: Victim, path: str, parts: list[tuple[list[str], bytes]], end: bytes
) -> None:
    body = b"".join(
        b"--b\r\n" + "\r\n".join(headers).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + data + b"\r\n"
        for headers, data in parts
    )
    headers = AUTHORIZED | {"Content-Type": "multipart/form-data; boundary=b"}
    answer = server.ask("POST", path, body + end, headers=headers)
    assert answer.status < 500, (body, answer.body)


# Settings

VALUES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable + "é", max_size=30)
    | st.lists(st.integers(0, 9), max_size=3)
    | st.dictionaries(
        st.text(string.ascii_lowercase, min_size=1, max_size=8),
        st.integers(0, 9) | st.text("abc", max_size=4),
        max_size=3,
    )
)


def to_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {to_toml(inner)}" for name, inner in value.items()) + "}"
    return f"[{', '.join(map(to_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def load_settings(path: Path, variables: Mapping[str, str] | None = None) -> str | None:
    """Load the settings, and return the message of the ConfigError if they are refused."""
    try:
        load(path, variables or {}, {})
    except ConfigError as error:
        return error.message
    return None


@FUZZ
@given(
    name=st.sampled_from(Settings.__struct_fields__) | st.text(string.ascii_lowercase + "_", min_size=1), value=VALUES
)
def test_generated_settings_load_or_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_text(f"{name} = {to_toml(value)}\n", "utf-8")
    message = load_settings(path)
    assert message is None or name in message


@FUZZ
@given(text=st.text(max_size=100) | st.binary(max_size=100))
def test_generated_settings_file_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    assert load_settings(path) != ""


@FUZZ
@given(
    name=st.sampled_from(Settings.__struct_fields__) | st.text(string.ascii_uppercase + "_", min_size=1, max_size=20),
    value=st.text(max_size=40) | JSON.map(lambda each: msgspec.json.encode(each).decode()),
)
def test_generated_variables_load_or_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: str
) -> None:
    variable = f"ANTIPHON_{name.upper()}"
    empty: Path = tmp_path_factory.getbasetemp() / "empty.toml"
    empty.write_text("")
    message = load_settings(empty, {variable: value})
    assert message is None or variable in message or name.lower() in message
