"""A server process for hostile tests: its memory, the blocks of its event loop, and connections to it."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.forked_command import ForkedCommand
from support.live_server import HttpResponse
from support.loop_blocks import longest_block

TIMEOUT = 60
# Lower than the default, to see blocks that come near it.
LOG_BLOCK_MS = 50


class Victim:
    """A running `antiphon serve` with its own folder, log and database."""

    def __init__(
        self,
        folder: Path,
        *,
        script: Mapping[str, Any] | None = None,
        backends: Mapping[str, Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log_path = folder / "server.log"
        (folder / "script.json").write_text(json.dumps(script or {}))
        chosen = backends or {"scripted": {"kind": "scripted", "script": str(folder / "script.json")}}
        values = {"log_block_ms": LOG_BLOCK_MS, "store": f"sqlite:///{folder}/store.db"} | settings
        tables = {f"backends.{name}": options for name, options in chosen.items()}
        tables |= {name: value for name, value in values.items() if isinstance(value, Mapping)}
        lines = [f"{name} = {_to_toml(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{json.dumps(key)} = {_to_toml(value)}" for key, value in table.items())]
        (folder / "antiphon.toml").write_text("\n".join(lines))
        self._process = self._start()

    def _start(self) -> ForkedCommand:
        arguments = ["serve", "--config", "antiphon.toml", "--port", "0"]
        with self.log_path.open("a") as log:
            process = ForkedCommand(arguments, cwd=self.folder, stderr=log)
        self.url = process.stdout.readline().strip().rpartition(" ")[2]
        if not self.url:
            process.wait(TIMEOUT)
            raise AssertionError(f"the server did not start: {self.log()}")
        return process

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """Return the log so far."""
        return self.log_path.read_text("utf-8", "replace")

    def is_running(self) -> bool:
        return self._process.poll() is None

    # Measurements

    def peak_mb(self) -> float:
        """Return the largest memory since the start or the last `reset_peak`, in MB."""
        return self._read_status("VmHWM")

    def rss_mb(self) -> float:
        return self._read_status("VmRSS")

    def reset_peak(self) -> None:
        """Let `peak_mb` count from now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def longest_block(self) -> float:
        """Return the CPU seconds of the longest block of the event loop that the watchdog has logged, or 0.

        The watchdog logs a block when it is over. A request makes sure that it is.
        """
        assert self.ask("GET", "/healthz").status == 200
        # The watchdog logs it at the end of its interval, a quarter of the threshold. No event shows that.
        time.sleep(2 * LOG_BLOCK_MS / 1000)
        return longest_block(self.log())

    def _read_status(self, name: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None, status
        return int(found[1]) / 1024

    # Requests

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a request on a new connection and return the response. A body that is not bytes is encoded as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            return HttpResponse(connection.getresponse())

    def connect(self) -> socket.socket:
        """Return a socket that is connected to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)

    @contextlib.contextmanager
    def send_raw(self, data: bytes) -> Iterator[socket.socket]:
        """Send bytes on a new connection and yield its socket."""
        with self.connect() as connection:
            connection.sendall(data)
            yield connection

    # The process

    def kill(self) -> None:
        """Send SIGKILL: the server cannot react."""
        self._process.kill()
        self._process.wait(TIMEOUT)

    def restart(self) -> None:
        """Start again on the same folder, after `kill` or `stop`."""
        assert not self.is_running()
        self._process.close()
        self._process = self._start()

    def stop(self) -> None:
        """End the process, with SIGKILL if it does not end in time."""
        try:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(TIMEOUT / 4)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(TIMEOUT)
        finally:
            self._process.close()


def _to_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_to_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_toml, value))}]"
    return json.dumps(value)
