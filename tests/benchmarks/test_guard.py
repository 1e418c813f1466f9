"""The guard compares counted work with a baseline, and reports when there is nothing to compare."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.counters import CounterUnavailable, PerfCounter  # noqa: E402

from benchmarks import guard  # noqa: E402

ROWS = ("decode", "prepare", "compose", "encode", "request", "stream")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard needs Linux")


def run_guard(tmp_path: Path, baselines: dict[str, dict[str, int]], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the guard with these baselines. Nothing may be left in its folder for temporary files."""
    file = tmp_path / "baselines.json"
    file.write_text(json.dumps(baselines))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.guard", "--kind", "calls", "--baselines", str(file), *options],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert list(temporary.iterdir()) == []
    return done


def test_guard_fails_if_one_count_is_above_its_limit(tmp_path: Path) -> None:
    baseline = dict.fromkeys(ROWS, 1_000_000) | {"encode": 10}
    done = run_guard(tmp_path, {guard.make_baseline_name("calls"): baseline})
    assert done.returncode == 1
    assert done.stderr.startswith("bench-guard: more than 10% above the baseline: encode.\n")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:8]] == list(ROWS)


def test_guard_passes_and_reports_counts_far_below_the_baseline(tmp_path: Path) -> None:
    done = run_guard(tmp_path, {guard.make_baseline_name("calls"): dict.fromkeys(ROWS, 1_000_000)})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"faster by more than 10%: {', '.join(ROWS)}; ARGS=--update records it" in done.stdout


def test_update_records_every_row_and_leaves_other_baselines(tmp_path: Path) -> None:
    other = {"calls, CPython 2.7": {"decode": 1}}
    done = run_guard(tmp_path, other, "--update")
    assert (done.returncode, done.stderr) == (0, "")
    written = json.loads((tmp_path / "baselines.json").read_text())
    assert tuple(written.pop(guard.make_baseline_name("calls"))) == ROWS
    assert written == other


def test_guard_without_a_baseline_reports_that_it_skips(tmp_path: Path) -> None:
    done = run_guard(tmp_path, {"calls, CPython 2.7": {"decode": 1}})
    assert done.returncode == 0
    assert done.stdout == (
        f"bench-guard: calls: no baseline for {guard.make_baseline_name('calls')}; ARGS=--update records one\n"
        "bench-guard: SKIPPED, nothing was compared\n"
    )


def test_counter_without_a_baseline_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_counter(kind: str) -> None:
        if kind == "perf":
            raise CounterUnavailable("no such event")

    monkeypatch.setattr(guard, "check_counter", check_counter)
    choice, reasons = guard.choose(guard.KINDS, {guard.make_baseline_name("calls"): {"decode": 1}})
    assert choice == guard.Choice("calls", {"decode": 1})
    assert reasons == [
        "perf: not available (no such event)",
        f"callgrind: no baseline for {guard.make_baseline_name('callgrind')}; ARGS=--update records one",
    ]


def test_limit_is_ten_percent_above_the_baseline() -> None:
    counts = {"decode": 110, "encode": 110.1, "new": 1}
    assert guard.find_slower(counts, {"decode": 100, "encode": 100}) == ["encode", "new"]


def test_committed_baselines_have_every_row() -> None:
    baselines = json.loads(guard.BASELINES.read_text())
    assert baselines
    assert {tuple(baseline) for baseline in baselines.values()} == {ROWS}


def test_perf_counter_counts_work() -> None:
    try:
        # The task clock, because few virtual machines count instructions. It takes the same calls.
        counter = PerfCounter(kind=1, event=1)
    except CounterUnavailable as error:
        pytest.skip(str(error))
    counter.start()
    sum(range(100_000))
    assert counter.stop() > 0


def test_call_counter_counts_python_and_c_calls() -> None:
    code = (
        "import threading\n"
        "from benchmarks.counters import CallCounter\n"
        "def work(): len('abc')\n"
        "counter = CallCounter()\n"
        "counter.start(); work(); work(); alone = counter.stop()\n"
        "counter.start(); thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "print(alone, counter.stop() > 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # Two calls each, and the call of `stop`.
    assert done.stdout == "5 True\n"
