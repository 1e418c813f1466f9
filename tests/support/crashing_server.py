"""Servers in processes of their own that are killed, and readers that remember what they were shown."""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE = 30


class Crashing:
    """A real server on a store that outlives it. `kill` is kill -9: it gets no chance to say anything."""

    def __init__(self, folder: Path, script: dict[str, Any], **settings: Any) -> None:
        path = folder / f"{time.monotonic_ns()}.toml"
        script_path = path.with_suffix(".json")
        script_path.write_text(json.dumps(script))
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        backend = ["[backends.scripted]", 'kind = "scripted"', f'script = "{script_path}"']
        path.write_text("\n".join([f'store = "sqlite:///{folder}/store.db"', 'log_level = "error"', *lines, *backend]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "serve", "--config", str(path), "--port", "0"],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip().rpartition("http://")[2]
        assert self.address, self._process.communicate()[1]

    def kill(self) -> None:
        self._process.kill()
        _, errors = self._process.communicate()
        assert "Traceback" not in errors, errors

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=PATIENCE)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())

    def begin(self, asked: str) -> str:
        """Ask for a background response, and give its id."""
        queued = self.ask("POST", "/v1/responses", {"model": "scripted", "input": asked, "background": True})
        assert queued["status"] == "queued"
        response_id: str = queued["id"]
        return response_id

    def status(self, response_id: str) -> str:
        status: str = self.ask("GET", f"/v1/responses/{response_id}")["status"]
        return status

    def read(self, response_id: str) -> list[bytes]:
        """Every event of a response, from the first to the last."""
        reader = Reader(self, response_id)
        reader.join()
        return reader.shown


class Reader:
    """Reads a stream to its end, however that comes, and remembers every event that it was shown whole."""

    def __init__(self, server: Crashing, response_id: str, *, after: int | None = None) -> None:
        self.response_id = response_id
        self.after = after
        self.shown: list[bytes] = []
        self._news = threading.Condition()
        self._address = server.address
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def last(self) -> int:
        """The number of the last event that was shown, here or before."""
        return (-1 if self.after is None else self.after) + len(self.shown)

    def wait_for(self, words: bytes) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(words in event for event in self.shown), PATIENCE), self.shown[-1:]

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        place = "" if self.after is None else f"&starting_after={self.after}"
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        # A server that is killed closes the connection in the middle of an answer, or before it.
        with contextlib.closing(connection), contextlib.suppress(http.client.HTTPException, OSError):
            connection.request("GET", f"/v1/responses/{self.response_id}?stream=true{place}")
            for event in read_events(connection.getresponse()):
                with self._news:
                    self.shown.append(event)
                    self._news.notify_all()


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The JSON of each event as it comes."""
    while line := response.readline():
        if line.startswith(b"data: {") and line.endswith(b"\n"):
            yield line.removeprefix(b"data: ").rstrip(b"\n")


def wait_until(happens: Callable[[], bool]) -> None:
    """For what can only be asked for again and again."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)
