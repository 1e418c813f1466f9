"""The services that the snippets about hosted tools use: an MCP server, a search provider and an images endpoint."""

import json
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = "https://python.example/zen"
MCP_SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers", log_level="ERROR")


@server.tool()
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


server.run("stdio")
'''


PROGRAM = """
const skus = ["chair", "lamp", "table"];
const stocks = await Promise.all(skus.map((sku) => tools.get_stock({sku})));
text("out of stock:", skus.filter((sku, index) => stocks[index].units === 0));
"""


def call(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"tool_call": {"name": name, "arguments": arguments}}]


SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {
            "last_item": "function_call_output",
            "text": "Readability",
            "answers": [f"Readability counts ([Zen]({PAGE}))."],
        },
        {"last_item": "function_call_output", "text": "image was created", "answers": ["Here is the cat."]},
        {"last_item": "function_call_output", "text": "out of stock", "answers": ["The lamp is out of stock."]},
        {"last_item": "function_call_output", "answers": ["2 + 3 is 5."]},
        {"user": "2 + 3", "answers": [call("add", {"one": 2, "other": 3})]},
        {"user": "out of stock", "answers": [call("programmatic_tool_calling", {"code": PROGRAM})]},
        {"user": "search", "answers": [call("web_search", {"query": "Zen of Python"})]},
        {"user": "draw", "answers": [call("image_generation", {"prompt": "a cat"})]},
    ],
}
ANSWERS: dict[str, Any] = {
    "/search": {"results": [{"url": PAGE, "title": "Zen", "content": "Readability counts."}]},
    "/v1/images/generations": {"data": [{"b64_json": b64encode(b"image").decode()}], "size": "1024x1024"},
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(ANSWERS[self.path.partition("?")[0]]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def run_services(folder: Path) -> Iterator[list[str]]:
    """Start the services, and yield the options of `antiphon serve` for a configuration with them."""
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    (folder / "numbers_server.py").write_text(MCP_SERVER)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        lines = [
            "[backends.scripted]",
            'kind = "scripted"',
            f"script = {json.dumps(str(folder / 'script.json'))}",
            "[mcp_servers.numbers]",
            f"command = {json.dumps(sys.executable)}",
            f"args = [{json.dumps(str(folder / 'numbers_server.py'))}]",
            "[web_search]",
            'provider = "searxng"',
            f"base_url = {json.dumps(url)}",
            "[image_generation]",
            f"base_url = {json.dumps(url + '/v1')}",
            'model = "m"',
        ]
        (folder / "services.toml").write_text("\n".join(lines))
        try:
            yield ["--config", str(folder / "services.toml")]
        finally:
            server.shutdown()
            thread.join()
