"""The steps of deploy/Containerfile, without a container engine and without downloads."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.postgres_server import is_installed

ROOT = Path(__file__).resolve().parents[2]


def is_free(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs make extras")
def test_image_is_built_and_its_server_is_healthy() -> None:
    if not is_free(8484):
        pytest.skip("the port of the image is in use")
    command = [sys.executable, str(ROOT / "scripts" / "run_containerfile.py"), "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "start, health check, stop" in lines
    assert lines[-1].startswith("ok: ")
