"""The real Codex CLI, with its own home and the configuration of `antiphon codex`, against a local server."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from antiphon.cli.main import main
from support.live_server import LiveServer, make_settings
from support.recording_backend import RecordingBackend

BINARY = Path(__file__).parents[3] / ".node/codex/node_modules/.bin/codex"
WAIT_SECONDS = 60
# Turn off every feature that contacts other machines.
QUIET = """\
check_for_update_on_startup = false
web_search = "disabled"

[analytics]
enabled = false

[feedback]
enabled = false

[otel]
exporter = "none"
metrics_exporter = "none"
trace_exporter = "none"

[features]
apps = false
plugins = false

# No retries: a failure is visible at once.
[model_providers.antiphon]
request_max_retries = 0
stream_max_retries = 0
"""


class Outcome(NamedTuple):
    events: list[dict[str, Any]]
    log: str

    @property
    def items(self) -> list[dict[str, Any]]:
        return [event["item"] for event in self.events if event["type"] == "item.completed"]

    @property
    def messages(self) -> list[str]:
        return [item["text"] for item in self.items if item["type"] == "agent_message"]

    @property
    def thread(self) -> str:
        return next(event["thread_id"] for event in self.events if event["type"] == "thread.started")


class Codex:
    """Runs `codex exec` in its own folder."""

    def __init__(self, server: LiveServer, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self.server = server
        self._log = log
        self.work = folder / "work"
        self.work.mkdir()
        self._home = folder / "home"
        self._home.mkdir()
        (self._home / "config.toml").write_text(QUIET)

    @property
    def model(self) -> RecordingBackend:
        assert isinstance(self.server.backend, RecordingBackend)
        return self.server.backend

    @property
    def methods(self) -> set[str]:
        """Return the methods of the requests for responses, from the log of the server."""
        lines = [record.getMessage() for record in self._log.records if record.name == "antiphon.access"]
        return {line.split()[0] for line in lines if "/v1/responses" in line}

    def configure(self, *options: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CODEX_HOME", str(self._home))
            assert main(["codex", "--url", self.server.url, "--write", *options]) == 0

    def run(self, *arguments: str, transport: str, settings: dict[str, Any] | None = None) -> Outcome:
        """Run Codex to its end. `settings` override the configuration."""
        changes = {"model_providers.antiphon.supports_websockets": transport == "websocket", **(settings or {})}
        options = [f"--config={name}={json.dumps(value)}" for name, value in changes.items()]
        done = subprocess.run(
            [
                str(BINARY),
                "exec",
                *arguments,
                "--json",
                "--strict-config",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                *options,
            ],
            cwd=self.work,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        outcome = Outcome(events, done.stderr)
        assert done.returncode == 0, outcome
        return outcome

    def _environment(self) -> dict[str, str]:
        # A proxy on a closed port: requests to other machines fail.
        closed = "http://127.0.0.1:9"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "CODEX_HOME": str(self._home),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), closed),
            "NO_PROXY": "127.0.0.1",
        }


@pytest.fixture
def codex(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Codex]]:
    """Return a function that starts a server with a script and configures Codex for it."""
    if not BINARY.exists() or shutil.which("node") is None:
        pytest.skip("Codex CLI is not installed: make test-clients installs it, if there is node")
    caplog.set_level("INFO", "antiphon.access")
    started: list[LiveServer] = []

    def start(script: dict[str, Any], *options: str, only_functions: bool = False) -> Codex:
        backend = RecordingBackend(script, only_functions=only_functions)
        started.append(LiveServer(script, make_settings(), backend=backend))
        made = Codex(started[-1], tmp_path, caplog)
        made.configure(*options)
        return made

    yield start
    for running in started:
        running.stop()
