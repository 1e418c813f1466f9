"""Floods of the servers that hosted tools call: the call fails, and the memory and the event loop stay bounded."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.crashing_server import wait_until
from support.hostile_peers import HostilePeers
from support.loop_blocks import MAX_BLOCK
from support.raw_server import serve_raw
from support.upstream_thread import ThreadedServer
from support.victim import Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

MAX_GROWTH_MB = 260


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"tool_call": {"name": name, "arguments": arguments, "call_id": "call_1"}}]


def make_script(url: str) -> dict[str, Any]:
    pages = [
        {"user": kind, "answers": [call("web_search", action="open_page", url=f"{url}/pages/{kind}")]}
        for kind in ("endless", "gzip-bomb", "drip", "nested")
    ]
    return {
        "native_tools": ["function"],
        "rules": [
            {"last_item": "function_call_output", "answers": ["Done."]},
            *pages,
            {"user": "search", "answers": [call("web_search", action="search", query="cats")]},
            {"user": "image", "answers": [call("image_generation", prompt="a cat")]},
            {"answers": [call("add")]},
        ],
    }


@pytest.fixture
def peers(upstream: Callable[..., ThreadedServer]) -> str:
    """The URL of the hostile peers."""
    return upstream(serve_raw(HostilePeers().answer)).url.removesuffix("/v1")


@pytest.fixture
def server(victim: Callable[..., Victim], peers: str) -> Iterator[Victim]:
    """A server whose hosted tools call hostile peers. Its memory and its event loop stay bounded in the test."""
    running = victim(
        script=make_script(peers),
        outbound_allow=["127.0.0.1"],
        web_search={"provider": "searxng", "base_url": peers, "timeout": 3},
        image_generation={"base_url": f"{peers}/v1", "model": "m", "stream": False, "timeout": 10},
        embeddings={"base_url": f"{peers}/v1", "model": "m", "timeout": 5},
    )
    before = running.rss_mb()
    yield running
    assert running.is_running()
    assert running.peak_mb() - before < MAX_GROWTH_MB
    assert running.longest_block() < MAX_BLOCK, running.log()


def respond(server: Victim, text: str, **tool: Any) -> tuple[int, list[str]]:
    """Return the status of the HTTP response, and the types and statuses of the output."""
    answer = server.ask("POST", "/v1/responses", {"model": "scripted", "input": text, "tools": [tool]})
    if answer.status != 200:
        return answer.status, [answer.json["error"]["code"]]
    return 200, [f"{item['type']} {item.get('status')}" for item in answer.json["output"]]


CALLED = (200, ["mcp_list_tools None", "mcp_call failed", "message completed"])
REFUSED = (424, ["http_error"])


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        pytest.param("endless-list", REFUSED, marks=pytest.mark.slow),
        ("many-tools", REFUSED),
        ("many-parts", CALLED),
        pytest.param("large-result", CALLED, marks=pytest.mark.slow),
        pytest.param("endless-events", CALLED, marks=pytest.mark.slow),
        pytest.param("endless-notifications", CALLED, marks=pytest.mark.slow),
        pytest.param("deep-result", CALLED, marks=pytest.mark.slow),
        pytest.param("private-redirect", CALLED, marks=pytest.mark.slow),
        pytest.param("silent", REFUSED, marks=pytest.mark.slow),
    ],
)
def test_flooding_mcp_server_fails_only_its_own_calls(
    server: Victim, peers: str, behaviour: str, outcome: tuple[int, list[str]]
) -> None:
    pytest.importorskip("mcp")
    url = f"{peers}/mcp/{behaviour}"
    assert respond(server, "add", type="mcp", server_label="s", server_url=url, require_approval="never") == outcome


@pytest.mark.slow
@pytest.mark.parametrize("text", ["search", "endless", "gzip-bomb", "drip", "nested"])
def test_flooding_search_provider_or_page_fails_only_its_call(server: Victim, text: str) -> None:
    status, output = respond(server, text, type="web_search")
    assert (status, output[-1]) == (200, "message completed")


@pytest.mark.slow
def test_flooding_image_endpoint_fails_only_its_call(server: Victim) -> None:
    status, output = respond(server, "image", type="image_generation")
    assert (status, output[-1]) == (200, "message completed")


@pytest.mark.slow
def test_flooding_embeddings_endpoint_fails_only_its_file(server: Victim) -> None:
    fields = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
    content = '--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nCats.\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    file = server.ask("POST", "/v1/files", (fields + content).encode(), headers=headers).json["id"]
    store = server.ask("POST", "/v1/vector_stores", {"file_ids": [file]}).json["id"]
    path = f"/v1/vector_stores/{store}/files/{file}"
    wait_until(lambda: server.ask("GET", path).json["status"] != "in_progress")
    assert server.ask("GET", path).json["status"] == "failed"
