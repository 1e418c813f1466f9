"""Modules that a started server has not imported. They would make the start slower and the process larger."""

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """
data_dir = "data"

[[api_keys]]
key = "sk-key"

[backends.chat]
kind = "chat_completions"
base_url = "http://127.0.0.1:9/v1"
models = ["small"]
"""

# The banner is printed when the server accepts requests.
PROGRAM = """
import sys
from antiphon.cli import main, serve
serve.format_banner = lambda *_, **__: " ".join(sys.modules)
main.main(["serve", "--port", "0"])
"""

UNUSED = {
    "aiohttp",
    "antiphon.agent",
    "antiphon.backends.anthropic",
    "antiphon.backends.embedded",
    "antiphon.backends.responses",
    "antiphon.grammars.trial",
    "antiphon.server.openapi",
    "antiphon.server.websocket.connection",
    "antiphon.store.memory",
    "asyncpg",
    "cryptography",
    "dbos",
    "html",
    "httpx",
    "importlib.metadata",
    "importlib.resources",
    "jsonschema",
    "llguidance",
    "mcp",
    "numpy",
    "onnxruntime",
    "opentelemetry",
    "pydantic",
    "wasmtime",
    "websockets",
    "xllamacpp",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder: Path = tmp_path_factory.mktemp("server")
    (folder / "antiphon.toml").write_text(SETTINGS)
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        modules = set(process.stdout.readline().split())
        process.terminate()
    return modules


def test_started_server_has_not_imported_unused_modules(loaded: set[str]) -> None:
    assert {"antiphon.server.process", "antiphon.backends.chat_completions"} <= loaded
    assert loaded & UNUSED == set()
