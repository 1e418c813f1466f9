"""Code of a model that takes all it can get from its sandbox."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.code_sandbox import CACHE, HAS_BUBBLEWRAP, require_sandbox
from support.crashing_server import wait_until
from support.loop_blocks import MAX_BLOCK
from support.victim import Victim

require_sandbox()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

CODES = {
    "flood": "import sys\nfor number in range(100_000): sys.stdout.write('x' * 1000)",
    "files": "for number in range(3000):\n    open(f'/mnt/data/{number}', 'w').close()",
    "deep": "import os\npath = '/mnt/data'\nfor number in range(300):\n    path += '/d'\n    os.mkdir(path)",
    "names": "for name in ['a\\nb', '\\u202e', 'x' * 200, ' ', '-rf', 'a;b', '%00']:\n"
    "    open(f'/mnt/data/{name}', 'w').write('x')",
    "bytes": "open(b'/mnt/data/\\xff', 'w').write('x')",
    "large": "with open('/mnt/data/large', 'wb') as file:\n    for number in range(30): file.write(b'0' * 1_000_000)",
    "memory": "found = []\nwhile True: found.append(bytearray(10_000_000))",
    "endless": "while True: pass",
}
CONTAINER = {"type": "auto", "memory_limit": "1g"}


@pytest.fixture(scope="module", params=["wasm", "bubblewrap"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    if request.param == "bubblewrap" and not HAS_BUBBLEWRAP:
        pytest.skip("bubblewrap cannot run here")
    rules = [{"last_item": "function_call_output", "answers": ["Done."]}]
    for name, code in CODES.items():
        call = {"name": "code_interpreter", "arguments": {"code": code}}
        rules.append({"user": name, "answers": [[{"tool_call": call}]]})
    settings = {
        "sandbox": request.param,
        "cache_dir": str(CACHE),
        "call_seconds": 5,
        "interpreters": 2,
        "container_bytes": 20 * 1024 * 1024,
    }
    script = {"native_tools": ["function"], "rules": rules}
    started = Victim(tmp_path_factory.mktemp("code"), script=script, code_interpreter=settings)
    yield started
    started.stop()


def run(server: Victim, name: str, container: Any = CONTAINER) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run code and return the call and the message after it."""
    tool = {"type": "code_interpreter", "container": container}
    body = {"model": "scripted", "input": name, "tools": [tool], "include": ["code_interpreter_call.outputs"]}
    response = server.ask("POST", "/v1/responses", body)
    assert response.status == 200, response.json
    call, message = response.json["output"]
    return call, message


@pytest.mark.parametrize("name", CODES)
def test_hostile_code_fails_alone_and_the_response_goes_on(server: Victim, name: str) -> None:
    before = server.rss_mb()
    server.reset_peak()
    call, message = run(server, name)
    assert (call["type"], message["type"]) == ("code_interpreter_call", "message")
    assert sum(len(output.get("logs", "")) for output in call["outputs"]) < 300_000
    files = server.ask("GET", f"/v1/containers/{call['container_id']}/files?limit=100").json["data"]
    assert sum(file["bytes"] for file in files) <= 20 * 1024 * 1024
    assert server.peak_mb() < before + 80
    assert server.longest_block() < MAX_BLOCK
    assert "Traceback" not in server.log()


def test_container_that_is_deleted_during_a_call_fails_only_the_call(server: Victim) -> None:
    container = server.ask("POST", "/v1/containers", {"name": "c"}).json["id"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, server, "endless", container)
        folder = server.folder / "store.db-containers" / container
        wait_until(lambda: any(folder.glob("scratch*")))
        assert server.ask("DELETE", f"/v1/containers/{container}").status == 200
        call, message = running.result()
    assert (call["status"], message["type"]) == ("failed", "message")
    assert server.ask("GET", f"/v1/containers/{container}").status == 404
    assert "Traceback" not in server.log()


def test_fifty_containers_leave_only_their_data(server: Victim) -> None:
    created = [server.ask("POST", "/v1/containers", {"name": f"c{number}"}).json["id"] for number in range(50)]
    assert [server.ask("DELETE", f"/v1/containers/{each}").status for each in created] == [200] * 50
    folders = server.folder / "store.db-containers"
    assert len(list(folders.glob("*/scratch*"))) <= 2  # of the interpreters that run
