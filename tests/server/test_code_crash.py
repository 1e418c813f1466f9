"""Code of a background response after SIGKILL: it ends with its server, and is not run twice."""

from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.serve.hosted.call_runner import UNKNOWN_OUTCOME
from antiphon.protocol.response import FINAL_STATUSES
from support.code_sandbox import CACHE, TOOL, call_code, require_sandbox
from support.crashing_server import KillableServer, wait_until

require_sandbox()

RUN = "with open('runs.txt', 'a') as file:\n    file.write('x')\nwhile True: pass"
SCRIPT = {
    "native_tools": ["function"],
    "rules": [
        {"last_item": "function_call_output", "answers": ["Done."]},
        {"user": "run", "answers": [[call_code(RUN)]]},
        {"user": "read", "answers": [[call_code("open('runs.txt').read()")]]},
    ],
}
SETTINGS: dict[str, Any] = {"background_lease_seconds": 0.5, "code_interpreter.cache_dir": str(CACHE)}


def find_processes(folder: Path) -> list[str]:
    """Return the processes that have this folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # ended meanwhile
            continue
    return found


@pytest.mark.slow
def test_killed_server_ends_the_code_and_does_not_run_it_again(tmp_path: Path) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("the system has no list of processes")
    containers = tmp_path / "store.db-containers"
    server = KillableServer(tmp_path, SCRIPT, **SETTINGS)
    try:
        response_id = server.start_background("run", tools=[TOOL])
        wait_until(lambda: any(path.read_text() == "x" for path in containers.glob("*/data/runs.txt")))
        assert find_processes(containers) != []
    finally:
        server.kill()
    wait_until(lambda: find_processes(containers) == [])

    server = KillableServer(tmp_path, SCRIPT, **SETTINGS)
    try:
        wait_until(lambda: server.status(response_id) in FINAL_STATUSES)
        path = f"/v1/responses/{response_id}?include[]=code_interpreter_call.outputs"
        response = server.ask("GET", path)
        call, message = response["output"]
        assert (response["status"], message["content"][0]["text"]) == ("completed", "Done.")
        assert (call["status"], call["code"], call["outputs"]) == (
            "failed",
            RUN,
            [{"type": "logs", "logs": UNKNOWN_OUTCOME}],
        )
        container = call["container_id"]
        body = {
            "model": "scripted",
            "input": "read",
            "tools": [{"type": "code_interpreter", "container": container}],
            "include": ["code_interpreter_call.outputs"],
        }
        after = server.ask("POST", "/v1/responses", body)["output"][0]
        assert (after["status"], after["outputs"]) == ("completed", [{"type": "logs", "logs": "'x'\n"}])
        files = server.ask("GET", f"/v1/containers/{container}/files")["data"]
        assert [(file["path"], file["bytes"]) for file in files] == [("/mnt/data/runs.txt", 1)]
    finally:
        server.kill()
