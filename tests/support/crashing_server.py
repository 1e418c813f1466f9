"""Server processes that tests kill, and readers that record the events they received."""

import contextlib
import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.forked_command import ForkedCommand
from support.loop_blocks import assert_no_block

TIMEOUT = 60


class KillableServer:
    """A server process on a store that outlives it. `kill` sends SIGKILL: the server cannot react."""

    def __init__(
        self,
        folder: Path,
        script: dict[str, Any],
        *,
        store: str = "",
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._path = folder / f"{time.monotonic_ns()}.toml"
        self._store = store or f"sqlite:///{folder}/store.db"
        self._path.with_suffix(".json").write_text(json.dumps(script))
        self.configure(**settings)
        arguments = ["serve", "--config", str(self._path), "--port", "0"]
        self._process = ForkedCommand(arguments, cwd=folder, env=env)
        self.address = self._process.stdout.readline().strip().rpartition("http://")[2]
        assert self.address, self._process.communicate()[1]

    def configure(self, **settings: Any) -> None:
        """Write the settings. A running server does not read them by itself."""
        settings = {"log_level": "warning", "data_dir": str(self._path.parent)} | settings
        lines = [f"{name} = {_format_value(value)}" for name, value in settings.items()]
        backend = ["[backends.scripted]", 'kind = "scripted"', f'script = "{self._path.with_suffix(".json")}"']
        self._path.write_text("\n".join([f'store = "{self._store}"', *lines, *backend]))

    def wait_for_log(self, words: str) -> str:
        """Read the log up to a line with these words and return it."""
        return next(line for line in self._process.stderr if words in line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Stop the server with a signal, which must succeed, and return the log."""
        return self.end(number, status=0)

    def end(self, number: signal.Signals, *, status: int) -> str:
        """Send a signal that ends the server with this exit status, and return the log."""
        self._process.send_signal(number)
        _, errors = self._process.communicate(timeout=TIMEOUT)
        assert self._process.returncode == status, errors
        assert "Traceback" not in errors, errors
        return errors

    def kill(self) -> None:
        self._process.kill()
        _, errors = self._process.communicate()
        assert "Traceback" not in errors, errors
        assert_no_block(errors)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=TIMEOUT)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())

    def start_background(self, text: str, **fields: Any) -> str:
        """Create a background response and return its id."""
        body = {"model": "scripted", "input": text, "background": True} | fields
        queued = self.ask("POST", "/v1/responses", body)
        assert queued["status"] == "queued"
        response_id: str = queued["id"]
        return response_id

    def status(self, response_id: str) -> str:
        status: str = self.ask("GET", f"/v1/responses/{response_id}")["status"]
        return status

    def read(self, response_id: str) -> list[bytes]:
        """Return all events of a response."""
        reader = StreamReader(self, response_id)
        reader.join()
        return reader.events


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_format_value(each)}' for name, each in value.items())}}}"
    return json.dumps(value)


class StreamReader:
    """Reads a stream in a thread until it ends or breaks, and records each event that arrived complete."""

    def __init__(self, server: KillableServer, response_id: str, *, after: int | None = None) -> None:
        self.response_id = response_id
        self.after = after
        self.events: list[bytes] = []
        self._changed = threading.Condition()
        self._address = server.address
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def last(self) -> int:
        """The sequence number of the last event received, by this reader or before it."""
        return (-1 if self.after is None else self.after) + len(self.events)

    def wait_for(self, text: bytes) -> None:
        """Wait for an event that contains this text."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in event for event in self.events), TIMEOUT), self.events[
                -1:
            ]

    def join(self) -> None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        cursor = "" if self.after is None else f"&starting_after={self.after}"
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT)
        # A killed server closes the connection during the response or before it.
        with contextlib.closing(connection), contextlib.suppress(http.client.HTTPException, OSError):
            connection.request("GET", f"/v1/responses/{self.response_id}?stream=true{cursor}")
            for event in read_events(connection.getresponse()):
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()


def read_events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the JSON of each event as it arrives."""
    while line := response.readline():
        if line.startswith(b"data: {") and line.endswith(b"\n"):
            yield line.removeprefix(b"data: ").rstrip(b"\n")


def wait_until(condition: Callable[[], bool], *, seconds: float = TIMEOUT) -> None:
    """Poll until the condition is true. Use it only if there is no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
