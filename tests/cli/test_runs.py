"""`antiphon runs` and the options of `antiphon run` for servers, costs and interrupted calls."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.agent.entries import CallIntentEntry
from antiphon.agent.journal import load
from antiphon.cli.main import main
from antiphon.store.ledger import SqliteLedger

TOOLS = '''
from pathlib import Path

from antiphon import ToolContext, tool

LOG = Path(__file__).with_name("log.txt")


@tool(needs_approval=True)
def pay(amount: int, context: ToolContext) -> str:
    """Pay."""
    with LOG.open("a") as log:
        log.write(f"{amount} {context.idempotency_key.partition(':')[2]}\\n")
    return "paid"
'''


def pay(amount: int) -> dict[str, Any]:
    return {"tool_call": {"name": "pay", "call_id": f"call_{amount}", "arguments": {"amount": amount}}}


USAGE = {"usage": {"input_tokens": 1000, "output_tokens": 500, "total_tokens": 1500}}
SCRIPT = {
    "rules": [
        {"user": "think", "answers": [[{"reasoning": "Let me see."}, {"text": "Done."}]]},
        {"user": "spend", "answers": [[{"text": "Spent."}, USAGE]]},
        {"user": "pay", "last_item": "function_call_output", "answers": ["It is paid."]},
        {"user": "pay", "answers": [[pay(1), pay(2)]]},
    ],
    "default": "In process: {input}",
}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def settings(home: Path) -> Path:
    """Configure the scripted model. No server listens on port 1, so that it runs in the process."""
    (home / "tools.py").write_text(TOOLS)
    (home / "script.json").write_text(json.dumps(SCRIPT))
    path = home / "antiphon.toml"
    path.write_text('port = 1\n[backends.scripted]\nkind = "scripted"\nscript = "script.json"\n')
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and returns its status, output and errors."""

    def start(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(list(arguments)), *capsys.readouterr()

    return start


def find_run_id(text: str) -> str:
    return str(re.findall(r"run_\w+", text)[0])


def find_ledger(home: Path) -> Path:
    (path,) = home.rglob("runs.db")
    return path


# The server or the process with the model


def use_server(settings: Path, url: str) -> None:
    settings.write_text(settings.read_text().replace("port = 1", f"port = {url.rpartition(':')[2]}"))


def test_running_server_is_used_by_default(server: Any, settings: Path, command: Command) -> None:
    use_server(settings, server.url)
    assert command("run", "hello") == (0, "You said: hello (1)\n", "")
    assert command("run", "hello", "--local") == (0, "In process: hello\n", "")


def test_terminal_says_which_server_is_used(server: Any, settings: Path, terminal: Any) -> None:
    use_server(settings, server.url)
    screen = terminal("run", "hello")
    shown = screen.read_until("You said: hello (1)")
    assert f"scripted in {server.url}" in shown
    assert screen.wait() == 0


def test_terminal_shows_loading_reading_and_reasoning(terminal: Any) -> None:
    screen = terminal("run", "think")
    shown = screen.read_until("Done.")
    positions = [shown.index(text) for text in ("loading the model", "reading ...", "reasoning: Let me see.")]
    assert positions == sorted(positions)
    # The status line is removed before the next output.
    assert "reading ...\x1b[0m\r\x1b[K" in shown
    assert screen.wait() == 0


# Costs


def test_cost_has_a_currency(settings: Path, command: Command) -> None:
    assert command("run", "spend", "--prices", "2,8", "--currency", "EUR")[0] == 0
    assert command("run", "spend")[0] == 0
    settings.write_text(f'run_prices = [4, 16, 1]\nrun_currency = "CHF"\n{settings.read_text()}')
    assert command("run", "spend")[0] == 0
    _, out, _ = command("runs", "list", "--json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [(each["cost"], each["currency"]) for each in listed] == [(0.012, "CHF"), (None, None), (0.006, "EUR")]
    _, out, _ = command("runs")
    assert [re.split(r"\s{2,}", line)[1:4] for line in out.splitlines()] == [
        ["STATE", "MODEL", "COST"],
        ["final", "scripted", "0.0120 CHF"],
        ["final", "scripted", "-"],
        ["final", "scripted", "0.0060 EUR"],
    ]
    _, out, _ = command("runs", "show", listed[0]["run_id"])
    assert out.splitlines()[1] == "1 turns, 0 calls, 1,500 tokens, 0.0120 CHF"
    status, out, _ = command("run", "spend", "--json", "--prices", "2,8")
    outcome = json.loads(out.splitlines()[-1])["outcome"]
    assert (status, outcome["cost"], outcome["currency"]) == (0, 0.006, "CHF")


def test_single_price_in_the_settings_is_refused(settings: Path, command: Command) -> None:
    settings.write_text(f"run_prices = [4]\n{settings.read_text()}")
    status, _, error = command("run", "spend")
    assert (status, error.startswith("antiphon: run_prices: expected the prices of input and output")) == (1, True)


# Calls that wait


def interrupt_call(path: Path, run_id: str, call_id: str) -> None:
    """Change the ledger as if a process had been killed during a call."""

    async def write() -> None:
        ledger = SqliteLedger(path)
        await (await load(run_id, ledger)).write(CallIntentEntry(call_id))
        await ledger.close()

    asyncio.run(write())


def test_approval_of_all_calls_leaves_out_those_that_may_have_happened(home: Path, command: Command) -> None:
    _, _, error = command("run", "pay", "--tools", "tools.py")
    run_id = find_run_id(error)
    interrupt_call(find_ledger(home), run_id, "call_2")
    status, out, error = command("runs", "resume", run_id, "--yes")
    assert (status, out, (home / "log.txt").read_text()) == (3, "", "1 1:0\n")
    assert error.splitlines() == [
        "antiphon: these calls wait for a decision:",
        '  call_2  pay({"amount":2})',
        f"    may have happened: it was running when the run was interrupted; key {run_id}:1:1",
        f"antiphon: To decide on each call: antiphon runs resume {run_id}",
        f"antiphon: To make the calls again that may have happened: antiphon runs resume {run_id} --repeat-interrupted",
    ]
    _, out, _ = command("runs", "resume", run_id, "--yes", "--json")
    pending = json.loads(out.splitlines()[-1])["outcome"]["pending"]
    assert [(each["reason"], each["idempotency_key"]) for each in pending] == [("may_have_happened", f"{run_id}:1:1")]
    assert command("runs", "resume", run_id, "--repeat-interrupted") == (0, "It is paid.\n", "")
    assert (home / "log.txt").read_text() == "1 1:0\n2 1:1\n"


def test_repeating_interrupted_calls_approves_no_others(home: Path, command: Command) -> None:
    _, _, error = command("run", "pay", "--tools", "tools.py", "--repeat-interrupted")
    run_id = find_run_id(error)
    assert "To approve the calls that need approval" in error
    interrupt_call(find_ledger(home), run_id, "call_1")
    status, _, error = command("runs", "resume", run_id, "--repeat-interrupted")
    assert (status, "call_2" in error, "call_1" in error) == (3, True, False)
    assert (home / "log.txt").read_text() == "1 1:0\n"


# List, show, delete, prune


def test_runs_are_listed_by_state_and_shown_as_json(command: Command) -> None:
    command("run", "hello")
    _, _, error = command("run", "pay", "--tools", "tools.py")
    waiting = find_run_id(error)
    status, out, _ = command("runs", "list", "--state", "needs_approval")
    assert (status, [line.split()[0] for line in out.splitlines()]) == (0, ["RUN", waiting])
    assert len(command("runs", "list", "--limit", "1")[1].splitlines()) == 2
    record = json.loads(command("runs", "show", waiting, "--json")[1])
    assert (record["run_id"], record["status"], record["model"]) == (waiting, "needs_approval", "scripted")
    assert [each["reason"] for each in record["pending"]] == ["needs_approval", "needs_approval"]


def test_error_of_a_failed_run_is_shown(command: Command) -> None:
    _, _, error = command("run", "hello", "--model", "unknown")
    message = "model_not_found: The model 'unknown' does not exist. Available models: 'scripted'."
    assert message in command("runs", "show", find_run_id(error))[1].splitlines()


def test_deleted_run_is_not_found_any_more(home: Path, command: Command) -> None:
    _, _, error = command("run", "pay", "--tools", "tools.py")
    run_id = find_run_id(error)
    assert list(home.rglob(f"{run_id}.json"))
    assert command("runs", "delete", run_id) == (0, f"deleted {run_id}\n", "")
    assert list(home.rglob(f"{run_id}.json")) == []
    missing = (1, "", f"antiphon: There is no run with id '{run_id}'.\n")
    assert command("runs", "delete", run_id) == command("runs", "show", run_id) == missing
    assert command("runs")[1] == ""


def test_old_runs_are_pruned(home: Path, settings: Path, command: Command) -> None:
    command("run", "hello")
    _, _, error = command("run", "pay", "--tools", "tools.py")
    waiting = find_run_id(error)
    (finished,) = {path.stem for path in home.rglob("run_*.json")} - {waiting}
    assert command("runs", "prune", "--older-than", "1") == (0, "", "0 runs\n")
    time_travel(find_ledger(home), days=3)
    assert command("runs", "prune", "--older-than", "1", "--dry-run") == (0, f"would delete {finished}\n", "1 runs\n")
    assert command("runs", "prune", "--older-than", "1") == (0, f"deleted {finished}\n", "1 runs\n")
    assert command("runs", "prune", "--older-than", "1", "--state", "failed") == (0, "", "0 runs\n")
    assert command("runs", "prune", "--older-than", "1", "--all") == (0, f"deleted {waiting}\n", "1 runs\n")
    assert list(home.rglob("run_*.json")) == []


def test_retention_setting_deletes_old_runs_at_the_next_run(home: Path, settings: Path, command: Command) -> None:
    _, _, error = command("run", "pay", "--tools", "tools.py")
    old = find_run_id(error)
    time_travel(find_ledger(home), days=3)
    command("run", "hello")
    assert len(command("runs")[1].splitlines()) == 3
    settings.write_text(f"run_retention_days = 2\n{settings.read_text()}")
    assert command("run", "hello")[0] == 0
    listed = command("runs")[1].splitlines()
    assert (len(listed), [line for line in listed if old in line]) == (3, [])


def time_travel(path: Path, *, days: float) -> None:
    """Make all runs of a ledger older."""

    async def change() -> None:
        ledger = SqliteLedger(path)
        await ledger.runs()
        assert ledger._connection is not None
        ledger._connection.execute("UPDATE runs SET updated_at = updated_at - ?", (int(days * 86400),))
        await ledger.close()

    asyncio.run(change())
