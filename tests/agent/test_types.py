"""The types of the agent: a typed program runs, and mypy accepts it and refuses mistakes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from support.scripted_model import ScriptedModel, call
from support.type_mistakes import FIRST_LINE, MISTAKES, write_programs
from support.typed_agent import Offer, Warehouse, call_tools, offer, score, watch, watch_output

ROOT = Path(__file__).parents[2]


async def test_typed_program_runs(in_process: ScriptedModel) -> None:
    stock = Warehouse({"chair": 5}, "Ada")
    in_process.set_answers([call("reserve", {"product": "chair", "pieces": 2})], '{"product": "chair", "pieces": 2}')
    assert await offer(in_process.transport, stock) == Offer("chair", 2)
    assert stock.stock == {"chair": 3, "reserve": 0}
    assert in_process.sent[0]["instructions"] == "You serve Ada."
    in_process.set_answers("Hello.")
    assert await watch(in_process.transport) == "Hello."
    in_process.set_answers("Hello.")
    assert await score(in_process.transport)
    in_process.set_answers([call("final_answer", {"product": "chair", "pieces": 2})])
    assert await watch_output(in_process.transport) == Offer("chair", 2)


def test_tools_are_called_as_their_functions() -> None:
    stock = Warehouse({"chair": 5}, "Ada")
    assert call_tools(stock) == 5
    assert stock.stock == {"chair": 4}


def write_config(folder: Path) -> Path:
    """Write the settings of the project, without its dependencies: reading them takes most of the time."""
    codes = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]["enable_error_code"]
    lines = [
        "[mypy]",
        f"mypy_path = {ROOT / 'src'}",
        "python_version = 3.11",
        "strict = True",
        f"enable_error_code = {', '.join(codes)}",
        "follow_imports = skip",
        "[mypy-antiphon.*,msgspec.*]",
        "follow_imports = silent",
    ]
    path = folder / "mypy.ini"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mypy_accepts_the_program_and_refuses_every_mistake(tmp_path: Path) -> None:
    programs = write_programs(tmp_path)
    options = ["--config-file", str(write_config(tmp_path)), "--cache-dir", str(ROOT / ".mypy_cache" / "programs")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *options, *map(str, programs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.findall(r"^(\S+?):(\d+): error: ", done.stdout, re.MULTILINE)
    refused = {(Path(path).name, int(line)) for path, line in errors}
    assert refused == {("mistakes.py", FIRST_LINE + index) for index in range(len(MISTAKES))}, done.stdout
