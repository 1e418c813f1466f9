"""Peers are installed into separate environments. If that fails, the message gives the reason."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

INSTALL = """
import sys
from pathlib import Path
from benchmarks import peers
try:
    peers.install(Path(sys.executable), Path(sys.argv[1]))
except peers.PeersUnavailable as error:
    print(error)
"""


def test_unreachable_index_is_reported_with_the_error_of_pip(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("antiphon-has-no-such-peer==1.0\n")
    done = subprocess.run(
        [sys.executable, "-c", INSTALL, str(requirements)],
        cwd=ROOT,
        env=os.environ | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (
        "requirements.txt cannot be installed (is the package index reachable? "
        "pip: No matching distribution found for antiphon-has-no-such-peer==1.0)\n"
    )
