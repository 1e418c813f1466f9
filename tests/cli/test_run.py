"""`antiphon run` and `antiphon runs`, with a scripted model and tools from a file."""

import asyncio
import io
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import runs
from antiphon.cli.main import main
from antiphon.store.ledger import SqliteLedger
from support.forked_command import ForkedCommand

WAIT_SECONDS = 20

TOOLS = '''
import asyncio
import os
import signal
import time
from pathlib import Path

from antiphon import ToolContext, tool

LOG = Path(__file__).with_name("log.txt")


def note(line: str) -> None:
    with LOG.open("a") as log:
        log.write(line + "\\n")


@tool
def count(number: int) -> int:
    """Count one on."""
    note(f"count {number}")
    return number + 1


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    note(f"pay {amount}")
    return "paid"


@tool
async def hang(context: ToolContext) -> str:
    """Wait without end."""
    note("hang")
    context.report("waiting ...")
    await asyncio.Event().wait()
    return ""


@tool
def block() -> str:
    """Wait in a thread, which cannot be stopped."""
    note("block")
    time.sleep(3600)
    return ""


@tool
def die(context: ToolContext) -> str:
    """Kill the process, the first time."""
    note(f"die {context.idempotency_key.partition(':')[2]}")
    if LOG.read_text().count("die") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("no fuse")
'''


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_call": {"name": name, "call_id": f"call_{name}", "arguments": arguments}}


def then(name: str, *answers: Any) -> list[Any]:
    return [[call(name)], *answers]


SCRIPT = {
    "rules": [
        {"user": "count", "answers": [[{"text": "Let me count."}, call("count", number=1)], "It is two."]},
        {
            "user": "pay",
            "last_item": "function_call_output",
            "text": "not approved",
            "answers": ["I was not allowed to."],
        },
        {"user": "pay", "last_item": "function_call_output", "answers": ["It is paid."]},
        {"user": "pay", "answers": [[call("pay", amount=7)]]},
        {"user": "hang", "last_item": "function_call_output", "answers": ["So be it."]},
        {"user": "hang", "answers": then("hang")},
        {"user": "block", "answers": then("block")},
        {"user": "die", "text": "survived", "answers": ["I live."]},
        {"user": "die", "last_item": "function_call_output", "answers": then("die")},
        {"user": "die", "answers": [[call("count", number=1)]]},
        {"user": "fail", "answers": then("fail", "It went wrong.")},
        {"user": "break", "answers": [[{"raise": {"message": "Too hot.", "status": 400}}], "Cooler now."]},
        {"user": "for ever", "answers": [[call("count", number=n)] for n in range(30)]},
    ],
    "default": "You said: {input} ({history})",
}


@pytest.fixture(autouse=True)
def settings(home: Path) -> None:
    """Configure the scripted model in the process, and write the tools next to it."""
    (home / "tools.py").write_text(TOOLS)
    (home / "script.json").write_text(json.dumps(SCRIPT))
    # No server listens on port 1, so that the model runs in the process.
    settings = 'port = 1\n[backends.scripted]\nkind = "scripted"\nscript = "script.json"\n'
    (home / "antiphon.toml").write_text(settings)


@pytest.fixture
def log(home: Path) -> Callable[[], list[str]]:
    """Return a function that returns the log lines of the tools."""
    return lambda: (home / "log.txt").read_text().splitlines()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def start(*arguments: str, given: str = "", tools: bool = True) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        status = main(["run", *arguments, *(("--tools", "tools.py") if tools else ())])
        return status, *capsys.readouterr()

    return start


def spawn(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ForkedCommand(arguments, cwd=Path.cwd())
    output, errors = command.communicate(timeout=WAIT_SECONDS)
    return subprocess.CompletedProcess(arguments, command.wait(WAIT_SECONDS), output, errors)


@contextmanager
def hanging_run() -> Iterator[ForkedCommand]:
    """Start a run in another process and wait until its tool hangs."""
    process = ForkedCommand(["run", "hang", "--tools", "tools.py", "--json"], cwd=Path.cwd())
    try:
        while "tool.progress" not in (line := process.stdout.readline()):
            assert line
        yield process
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
        process.close()


def list_runs(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert main(["runs"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["RUN", "STATE", "MODEL", "COST", "UPDATED", "TASK"]
    return [re.split(r"\s{2,}", line) for line in lines]


def test_pipe_gets_only_the_answer_of_a_run(run: Run, log: Callable[[], list[str]]) -> None:
    assert run("count, please") == (0, "It is two.\n", "")
    assert log() == ["count 1"]


def test_task_is_read_from_standard_input(run: Run) -> None:
    assert run("-", given="hello", tools=False) == (0, "You said: hello (1)\n", "")
    assert run("-", given=" ", tools=False) == (1, "", "antiphon: The task is empty.\n")


def test_model_of_a_server_is_used(server: Any, run: Run) -> None:
    assert run("hello", "--url", server.url, tools=False) == (0, "You said: hello (1)\n", "")


def test_instructions_and_model_options_are_used(run: Run) -> None:
    assert run("hello", "--model", "scripted", "--instructions", "Be kind.", tools=False)[0] == 0
    status, _, error = run("hello", "--model", "unknown", tools=False)
    assert status == 1
    assert error.startswith("antiphon: the run failed: The model 'unknown' does not exist")


def test_tool_error_goes_to_the_model_without_a_traceback(run: Run) -> None:
    assert run("fail") == (0, "It went wrong.\n", "")


def test_json_option_prints_events_as_lines(run: Run) -> None:
    status, out, error = run("count", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (status, error) == (0, "")
    assert [event["type"] for event in events if not event["type"].endswith(".delta")] == [
        "turn.started",
        "turn.finished",
        "tool.started",
        "tool.finished",
        "turn.started",
        "turn.finished",
        "run.ended",
    ]
    assert len({event["run_id"] for event in events}) == 1
    outcome = events[-1]["outcome"]
    assert (outcome["kind"], outcome["output"], outcome["turns"], outcome["tool_calls"]) == (
        "final",
        "It is two.",
        2,
        1,
    )


def test_limit_ends_the_run_with_exit_4(run: Run) -> None:
    def find_message(*arguments: str) -> tuple[int, str]:
        status, _, error = run(*arguments)
        return status, re.sub(r"run_\w+", "RUN", error)

    resume = "antiphon: To continue with a higher limit: antiphon run --resume RUN"
    status, error = find_message("for ever", "--max-turns", "3")
    assert (status, error) == (4, f"antiphon: the run reached a limit: max_turns\n{resume} --max-turns N\n")
    status, error = find_message("for ever", "--max-tokens", "1")
    assert (status, error) == (4, f"antiphon: the run reached a limit: budget\n{resume} --max-tokens N\n")
    status, error = find_message("hang", "--deadline", "0.2")
    assert (status, error) == (4, f"antiphon: the run reached a limit: deadline\n{resume} --deadline SECONDS\n")


def test_run_at_its_limit_goes_on_with_a_higher_one(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run("for ever", "--max-turns", "2")
    run_id = re.findall(r"run_\w+", error)[0]
    assert status == 4
    status, answer, _ = run("--resume", run_id, "--max-turns", "6", tools=False)
    assert (status, answer.startswith("You said: The limit was raised")) == (0, True)
    assert main(["runs", "show", run_id]) == 0
    assert capsys.readouterr().out.splitlines()[1][:8] == "4 turns,"


def test_live_run_is_only_taken_over_by_force(
    log: Callable[[], list[str]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hanging_run():
        ((run_id, status, *_),) = list_runs(capsys)
        assert status == "running"
        assert main(["runs", "show", run_id]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"{run_id}  running  scripted"
        (options,) = home.rglob(f"{run_id}.json")
        stored = options.read_bytes()
        assert main(["run", "--resume", run_id, "--max-turns", "99"]) == 1
        expected = (
            f"antiphon: Another process is executing the run '{run_id}'. "
            f"To take it over: antiphon runs resume {run_id} --force\n"
        )
        assert (capsys.readouterr().err, options.read_bytes() == stored) == (expected, True)
        assert main(["runs", "resume", run_id, "--force"]) == 3
    assert log() == ["hang"]


def test_runs_of_subagents_do_not_hide_other_runs(
    run: Run, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("count")
    (database,) = home.rglob("runs.db")
    monkeypatch.setattr(runs, "MAX_LISTED", 2)

    async def add() -> None:
        ledger = SqliteLedger(database)
        for index in range(9):
            await ledger.append(f"run_1:1:{index}", 0, b"{}")
        await ledger.close()

    asyncio.run(add())
    assert [status for _, status, *_ in list_runs(capsys)] == ["final"]


def test_call_runs_once_after_approval_on_resume(run: Run, log: Callable[[], list[str]]) -> None:
    status, out, error = run("pay")
    run_id = re.findall(r"run_\w+", error)[0]
    assert (status, out) == (3, "")
    assert error.splitlines() == [
        "antiphon: these calls wait for a decision:",
        '  call_pay  pay({"amount":7})',
        f"    needs approval; key {run_id}:1:0",
        f"antiphon: To decide on each call: antiphon runs resume {run_id}",
        f"antiphon: To approve the calls that need approval: antiphon runs resume {run_id} --yes",
    ]
    done = spawn("runs", "resume", run_id)
    assert (done.returncode, done.stderr) == (3, error)
    done = spawn("runs", "resume", run_id, "--yes")
    assert (done.returncode, done.stdout, done.stderr) == (0, "It is paid.\n", "")
    done = spawn("run", "--resume", run_id, "--yes")
    assert (done.returncode, done.stdout) == (0, "It is paid.\n"), "a run that has ended prints its answer again"
    assert log() == ["pay 7"]


def test_yes_option_approves_all_calls(run: Run, log: Callable[[], list[str]]) -> None:
    assert run("pay", "--yes") == (0, "It is paid.\n", "")
    assert log() == ["pay 7"]


@pytest.mark.parametrize(("answer", "output"), [("y", "It is paid."), ("n", "I was not allowed to.")])
def test_terminal_asks_for_approval(terminal: Any, log: Any, home: Path, answer: str, output: str) -> None:
    screen = terminal("run", "pay", "--tools", "tools.py", "--prices", "2,8")
    screen.read_until("make this call? [y/n] ")
    screen.type("perhaps\n")
    screen.read_until("make this call? [y/n] ")
    screen.type(f"{answer}\n")
    shown = screen.read_until(output)
    assert ("> pay(" in shown) is (answer == "y")
    screen.read_until("run_")
    assert re.search(r"\w+: 2 turns, \d calls, [\d,]+ tokens, 0\.0\d+ USD", screen.read_until("\x1b[0m"))
    assert screen.wait() == 0
    assert (home / "log.txt").exists() is (answer == "y")


def test_unanswered_approval_can_be_resumed_later(terminal: Any) -> None:
    screen = terminal("run", "pay", "--tools", "tools.py")
    screen.read_until("make this call? [y/n] ")
    screen.type("\x04")
    screen.read_until("antiphon runs resume run_")
    assert screen.wait() == 3


def test_terminal_shows_progress(terminal: Any) -> None:
    screen = terminal("run", "count", "--tools", "tools.py")
    shown = screen.read_until("It is two.")
    for words in ("Let me count.", '> count({"number":1})', "< count: 2", "turn 1:", "tokens so far"):
        assert words in shown
    assert screen.wait() == 0


@pytest.mark.parametrize("tool", ["hang", "block"])
def test_ctrl_c_stops_the_run_and_shows_how_to_continue(terminal: Any, home: Path, tool: str) -> None:
    screen = terminal("run", tool, "--tools", "tools.py")
    screen.read_until(f"> {tool}(")
    screen.type("\x03")
    shown = screen.read_until("antiphon: stopped. To continue: antiphon runs resume run_")
    # The call has no result, because its effect is not known.
    assert f"< {tool}: " not in shown
    assert screen.wait() == 130


def test_stopped_run_asks_about_the_call_that_had_begun(
    log: Callable[[], list[str]], home: Path, terminal: Any
) -> None:
    with hanging_run() as process:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=WAIT_SECONDS)
    run_id = re.findall(r"run_\w+", error)[0]
    assert process.returncode == 130
    paused = spawn("runs", "resume", run_id)
    assert (paused.returncode, "call_hang  hang({})" in paused.stderr) == (3, True)
    screen = terminal("runs", "resume", run_id)
    screen.read_until("It may have taken effect.")
    screen.read_until("make this call? [y/n] ")
    screen.type("n\n")
    screen.read_until("So be it.")
    assert screen.wait() == 0
    assert log() == ["hang"]


def test_killed_run_asks_only_about_the_interrupted_call(
    log: Callable[[], list[str]], capsys: pytest.CaptureFixture[str], terminal: Any
) -> None:
    killed = spawn("run", "die", "--tools", "tools.py")
    assert killed.returncode == -signal.SIGKILL
    ((run_id, status, *_, title),) = list_runs(capsys)
    assert (status, title) == ("interrupted", "die")
    paused = spawn("run", "--resume", run_id)
    assert (paused.returncode, "call_die  die({})" in paused.stderr) == (3, True)
    key = f"key {run_id}:2:0"
    reason = "may have happened: it was running when the run was interrupted"
    assert f"    {reason}; {key}\n" in paused.stderr
    assert f"antiphon runs resume {run_id} --repeat-interrupted\n" in paused.stderr
    # The option applies to calls that were not made yet.
    assert spawn("runs", "resume", run_id, "--yes").returncode == 3
    screen = terminal("runs", "resume", run_id)
    screen.read_until("It may have taken effect.")
    screen.read_until("make this call? [y/n] ")
    screen.type("y\n")
    screen.read_until("I live.")
    assert screen.wait() == 0
    counted, first, second = sorted(log())
    assert counted == "count 1"
    assert first == second, "both attempts have the same key"
    ((_, status, *_),) = list_runs(capsys)
    assert status == "final"


def test_failed_run_can_be_resumed(run: Run, home: Path) -> None:
    status, _, error = run("break", tools=False)
    run_id = re.findall(r"run_\w+", error)[0]
    assert (status, error.splitlines()) == (
        1,
        ["antiphon: the run failed: Too hot.", f"antiphon: To continue: antiphon runs resume {run_id}"],
    )
    (home / "script.json").write_text(json.dumps(SCRIPT | {"rules": []}))
    assert run("--resume", run_id, tools=False) == (0, "You said: break (1)\n", "")


def test_run_is_resumed_with_its_tools_from_another_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    config = str(home / "antiphon.toml")
    script = str(home / "script.json")
    Path(config).write_text(f'port = 1\n[backends.scripted]\nkind = "scripted"\nscript = "{script}"\n')
    _, _, error = run("pay", "--config", config)
    run_id = re.findall(r"run_\w+", error)[0]
    assert f"antiphon runs resume {run_id} --config {config}" in error
    monkeypatch.chdir(tmp_path)
    done = spawn("runs", "--config", config, "resume", run_id, "--yes")
    assert (done.returncode, done.stdout) == (0, "It is paid.\n")


def test_runs_are_listed_and_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr() == ("", "There are no runs. 'antiphon run' starts one.\n")
    run("count")
    run("pay  twice\nor so")
    (waiting, status, *_, title), (counted, *_) = list_runs(capsys)
    assert (status, title) == ("needs_approval", "pay twice or so")
    assert main(["runs", "show", counted]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{counted}  final  scripted"
    assert re.fullmatch(r"2 turns, 1 calls, \d+ tokens", shown[1])
    assert shown[3:] == [
        "user: count",
        "assistant: Let me count.",
        '> count({"number":1})',
        "< 2",
        "assistant: It is two.",
    ]
    assert main(["runs", "show", waiting]) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "",
        "calls that wait for a decision:",
        '  call_pay  pay({"amount":7})',
        f"    needs approval; key {waiting}:1:0",
        "",
        f"To continue: antiphon runs resume {waiting}",
    ]


@pytest.mark.parametrize("line", [["run", "--resume", "run_0"], ["runs", "show", "run_0"], ["runs", "resume", "run_0"]])
def test_unknown_run_is_named_in_the_error(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 1
    assert capsys.readouterr() == ("", "antiphon: There is no run with id 'run_0'.\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["run", "x", "--tools", "nowhere"], "There is no module 'nowhere' to load tools from."),
        (["run", "x", "--max-turns", "0"], "The limit 'turns' must be at least 1."),
        (["run", "x", "--url", "nonsense"], "'nonsense' is not a valid server URL: use http://HOST:PORT."),
        (["run", "--resume", "../x"], "'../x' is not a valid run id."),
        (["run", "caf\udce9"], "The arguments or the working directory contain bytes that are not UTF-8."),
    ],
)
def test_run_that_cannot_start_is_one_line_and_exit_1(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 1
    assert capsys.readouterr() == ("", f"antiphon: {message}\n")


@pytest.mark.parametrize(
    "line",
    [
        ["run"],
        ["run", "x", "--resume", "y"],
        ["run", "x", "--prices", "1"],
        ["runs", "dance"],
        ["run", "x", "--force"],
        ["runs", "prune", "--older-than", "-1"],
        ["run", "x", "--prices", "1,x"],
        ["run", "x", "--prices", "1,nan"],
        ["runs", "delete"],
        ["runs", "list", "--limit", "0"],
        ["runs", "list", "--state", "asleep"],
        ["runs", "prune", "--older-than", "1", "--state", "asleep"],
    ],
)
def test_invalid_arguments_are_a_usage_error(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(line)
    assert exited.value.code == 2
    assert f"usage: antiphon {line[0]}" in capsys.readouterr().err
