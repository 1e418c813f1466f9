"""The types of the agent, as pyright sees them in the program of a user in strict mode."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.type_mistakes import FIRST_LINE, MISTAKES, write_programs

PACKAGES = Path(__file__).parents[3] / ".node/node/node_modules"
PYRIGHT = PACKAGES / "pyright/index.js"
TIMEOUT_SECONDS = 120


def test_pyright_accepts_the_program_and_refuses_every_mistake(tmp_path: Path) -> None:
    if not PYRIGHT.exists() or shutil.which("node") is None:
        pytest.skip("pyright is not installed: make test-clients installs it, if there is node")
    write_programs(tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    done = subprocess.run(
        ["node", str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["generalDiagnostics"]
    refused = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in found}
    assert refused == {("mistakes.py", FIRST_LINE + index) for index in range(len(MISTAKES))}, found
