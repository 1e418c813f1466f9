"""The real Codex CLI, with a home of its own and our own configuration, against a server on loopback."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from antiphon.cli.main import main
from clients.recorder import Recorder
from support.live_server import LiveServer, make_settings

BINARY = Path(__file__).parents[3] / ".node/codex/node_modules/.bin/codex"
PATIENCE_SECONDS = 60
# What Codex would tell or ask other machines.
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

# A failure shows at once.
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
    """`codex exec` in a folder of its own."""

    def __init__(self, server: LiveServer, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self.server = server
        self._log = log
        self.work = folder / "work"
        self.work.mkdir()
        self._home = folder / "home"
        self._home.mkdir()
        (self._home / "config.toml").write_text(QUIET)

    @property
    def model(self) -> Recorder:
        assert isinstance(self.server.backend, Recorder)
        return self.server.backend

    @property
    def methods(self) -> set[str]:
        """How responses were asked for, by the server's log."""
        lines = [record.getMessage() for record in self._log.records if record.name == "antiphon.access"]
        return {line.split()[0] for line in lines if "/v1/responses" in line}

    def configure(self, *options: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CODEX_HOME", str(self._home))
            assert main(["codex", "--url", self.server.url, "--write", *options]) == 0

    def run(self, *arguments: str, transport: str, settings: dict[str, Any] | None = None) -> Outcome:
        """A whole run. `settings` go over those of the configuration."""
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
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        events = [json.loads(line) for line in done.stdout.splitlines()]
        outcome = Outcome(events, done.stderr)
        assert done.returncode == 0, outcome
        return outcome

    def _environment(self) -> dict[str, str]:
        # Whatever it wants of another machine ends at a port where nobody listens.
        nowhere = "http://127.0.0.1:9"
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "CODEX_HOME": str(self._home),
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere),
            "NO_PROXY": "127.0.0.1",
        }


@pytest.fixture
def codex(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Codex]]:
    """Starts a server with a script and configures Codex for it."""
    if not BINARY.exists() or shutil.which("node") is None:
        pytest.skip("Codex CLI is not installed: make test-clients installs it, if there is node")
    caplog.set_level("INFO", "antiphon.access")
    started: list[LiveServer] = []

    def start(script: dict[str, Any], *options: str, only_functions: bool = False) -> Codex:
        backend = Recorder(script, only_functions=only_functions)
        started.append(LiveServer(script, make_settings(), backend=backend))
        made = Codex(started[-1], tmp_path, caplog)
        made.configure(*options)
        return made

    yield start
    for running in started:
        running.stop()
