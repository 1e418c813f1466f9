import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_shape.py"
EXEMPTION = "noqa" + ": C901"  # split, so that the check of this file does not find it


def check(directory: Path) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines of a run in `directory`."""
    result = subprocess.run([sys.executable, SCRIPT, "src"], cwd=directory, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.splitlines()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_code_within_the_limits_passes(tmp_path: Path) -> None:
    write(tmp_path / "src/antiphon/__init__.py", "from antiphon.errors import AntiphonError\n")
    write(tmp_path / "src/antiphon/backends/__init__.py", "from antiphon.backends.base import Backend\n")
    write(tmp_path / "src/antiphon/server/__init__.py", "")
    write(tmp_path / "src/antiphon/long.py", "x = 1\n" * 500)
    write(tmp_path / "src/antiphon/function.py", "def run():\n" + "    x = 1\n" * 79)

    assert check(tmp_path) == (0, ["shape: 5 files, 0 faults"])


def test_every_fault_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "src/antiphon/engine/__init__.py", "from antiphon.engine.run import run\n")
    write(tmp_path / "src/antiphon/long.py", "x = 1\n" * 501)
    write(tmp_path / "src/antiphon/run.py", "async def run():\n" + "    x = 1\n" * 80)
    write(tmp_path / "src/antiphon/stream_utils.py", f"def knot():  # {EXEMPTION}\n    pass\n")

    assert check(tmp_path) == (
        1,
        [
            "src/antiphon/engine/__init__.py: an inner __init__.py must be empty: re-exports hide imports",
            "src/antiphon/long.py: 501 lines, at most 500 are allowed",
            "src/antiphon/run.py:1: run has 81 lines, at most 80 are allowed",
            "src/antiphon/stream_utils.py: the name is too vague: use a noun for the contents",
            "src/antiphon/stream_utils.py:1: exemptions from the complexity limit are not allowed",
            "shape: 4 files, 5 faults",
        ],
    )


def test_class_name_that_two_modules_use_is_reported_unless_shared(tmp_path: Path) -> None:
    write(tmp_path / "src/antiphon/first.py", "class Route: ...\nclass Turn: ...\nclass _Private: ...\n")
    write(tmp_path / "src/antiphon/second.py", "class Turn: ...\nclass _Private: ...\nclass Route: ...\n")

    assert check(tmp_path) == (
        1,
        [
            "src/antiphon/second.py:3: the class name Route is used in src/antiphon/first.py too",
            "shape: 2 files, 1 faults",
        ],
    )


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    assert check(tmp_path) == (2, [])
