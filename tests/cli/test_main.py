import subprocess
import sys

import pytest

from antiphon import __version__
from antiphon.cli.main import main


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"antiphon {__version__}\n"


def test_module_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "antiphon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"antiphon {__version__}\n"


def test_version_loads_no_server_and_no_model():
    code = (
        "import sys, contextlib\n"
        "from antiphon.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "print(sorted({'asyncio', 'msgspec', 'uvicorn', 'http.client', 'xllamacpp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("line", [[], ["sing"], ["serve", "--prot", "1"], ["chat", "--url", "u", "--local"]])
def test_invalid_arguments_are_a_usage_error(line, capsys):
    with pytest.raises(SystemExit) as exited:
        main(line)
    assert exited.value.code == 2
    assert "usage: antiphon" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "pull", "models", "prompts", "run", "runs"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert f"usage: antiphon {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "chat", "pull", "models", "runs"])
def test_invalid_configuration_is_one_line_and_exit_1(command, home, capsys):
    (home / "antiphon.toml").write_text("prot = 1\n")
    assert main([command]) == 1
    assert capsys.readouterr() == ("", "antiphon: antiphon.toml: unknown setting 'prot'. Did you mean port?\n")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_command_runs_with_closed_standard_streams(closed, home):
    """Each open file gets the lowest free descriptor: a server would abort if one of these were its socket."""
    command = [sys.executable, "-m", "antiphon", "config", "check"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ok\n") is ("1>" not in closed)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_child_process_of_a_command_has_standard_streams(closed, home):
    """The workers of a server are child processes with its streams."""
    child = "import os; [os.fstat(descriptor) for descriptor in range(3)]"
    program = (
        "import subprocess, sys; from antiphon.cli.main import main; "
        f"sys.exit(main(['config', 'check']) or subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_configuration_is_one_line_and_exit_1(capsys):
    assert main(["models", "--config", "nowhere.toml"]) == 1
    assert capsys.readouterr() == ("", "antiphon: Cannot read nowhere.toml: No such file or directory.\n")


def test_closed_pipe_shows_no_traceback(server):
    command = f"{sys.executable} -m antiphon chat --url {server.url} <<< 'hello' | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
