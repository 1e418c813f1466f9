"""The examples run unchanged against a real server with a scripted model."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live_server import LiveServer, make_settings

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 30


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"tool_call": {"name": name, "arguments": arguments}}]


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Return a function that runs an example on a server with a script and returns its output."""
    started: list[LiveServer] = []

    def start(name: str, script: dict[str, Any], *arguments: str) -> str:
        started.append(LiveServer(script, make_settings()))
        command = [sys.executable, str(EXAMPLES / name), "--url", f"{started[-1].url}/v1", "--model", "scripted"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield start
    for running in started:
        running.stop()


def test_every_example_has_a_test() -> None:
    tested = Path(__file__).read_text("utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []


def test_bounty_review_prints_the_decision(run: Callable[..., str]) -> None:
    reads = [call("read_file", path=path) for path in ("dates.py", "nowhere.py", "test_dates.py")]
    decision = {"is_approved": True, "reason": "It parses, and there is a test."}
    script = {
        "rules": [{"user": "bounty", "answers": [call("list_files"), *reads, call("submit_decision", **decision)]}]
    }
    assert json.loads(run("bounty_review.py", script)) == decision


def test_edit_code_prints_a_bundle_and_writes_no_file(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "dates.py").write_text("def parse(): ...\n")
    (tmp_path / "old.py").write_text("")
    answers = [
        call("list_files"),
        call("read_file", path="dates.py"),
        call("write_file", path="dates.py", contents="def read(): ...\n"),
        call("write_file", path="../outside.py", contents=""),
        call("write_file", path="new.py", contents="new\n") + call("delete_file", path="old.py"),
        "I have renamed parse to read.",
    ]
    printed = run(
        "edit_code.py", {"rules": [{"user": "Rename", "answers": answers}]}, "--folder", str(tmp_path), "Rename it."
    )
    text, bundle = printed.splitlines()
    assert text == "I have renamed parse to read."
    assert json.loads(bundle) == {
        "Root": ".",
        "Files": [
            {"Action": "update", "Path": "dates.py", "Contents": "def read(): ...\n"},
            {"Action": "create", "Path": "new.py", "Contents": "new\n"},
            {"Action": "delete", "Path": "old.py", "Contents": None},
        ],
    }
    assert (tmp_path / "dates.py").read_text() == "def parse(): ...\n"


def test_rag_question_is_answered_with_its_sources(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "retention.md").write_text("# Retention\n\nResponses are stored for 30 days.\n\nSomething else.\n")
    script = {"rules": [{"user": "stored for 30 days", "answers": ["For 30 days (retention.md:3)."]}]}
    printed = run("rag_question.py", script, "--folder", str(tmp_path), "How long are responses stored?")
    assert printed == "For 30 days (retention.md:3).\n  retention.md:3: retention.md, lines 3 to 3\n"
