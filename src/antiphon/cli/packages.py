"""Find the download URLs of packages. pip does it, so that the configured index, mirror and certificates apply."""

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
    """The URL of a wheel, its hash if the index has one, and the CA file to use."""

    url: str
    sha256: str | None = None
    cert: str | None = None


def locate_wheels(requirements: Sequence[str]) -> dict[str, Wheel]:
    """Return the wheel of each requirement, `NAME==VERSION`."""
    if importlib.util.find_spec("pip") is None:
        raise AntiphonError(
            "antiphon pull needs pip, which is not installed. Install it with "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), then run the same command again."
        )
    found = _query_index(requirements)
    missing = [requirement for requirement in requirements if requirement not in found]
    if missing:
        found |= _query_report(missing)
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, check=False)


def _query_index(requirements: Sequence[str]) -> dict[str, Wheel]:
    result = _run([str(Path(__file__).with_name("index_query.py")), *requirements])
    if result.returncode != 0:
        return {}
    return {found.pop("requirement"): Wheel(**found) for found in json.loads(result.stdout)}


def _query_report(requirements: Sequence[str]) -> dict[str, Wheel]:
    """Return the wheels that `pip install` would download, from its documented report."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--no-input", "--quiet"]
    result = _run(["-m", "pip", "install", *options, "--report=-", *requirements])
    if result.returncode != 0:
        raise AntiphonError(f"pip cannot find {', '.join(requirements)}: {_find_cause(result.stderr)}")
    installs: list[dict[str, Any]] = json.loads(result.stdout)["install"]
    return {
        requirement: _parse_download_info(install["download_info"])
        for requirement, install in zip(requirements, installs, strict=True)
    }


def _parse_download_info(info: dict[str, Any]) -> Wheel:
    return Wheel(url=info["url"], sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"))


def _find_cause(stderr: str) -> str:
    """Return the last error line of pip, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1]
