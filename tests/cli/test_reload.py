import http.client
import os
import signal
import subprocess
import sys
import threading

import pytest

from antiphon.cli.main import main
from antiphon.server.running_servers import FOLDER, ReloadResult, ServerFile, find_server, list_servers

SETTINGS = """
data_dir = "data"
{line}
[backends.scripted]
kind = "scripted"
script = "script.json"
"""


@pytest.fixture
def configure(home, script):
    def write(line=""):
        (home / "antiphon.toml").write_text(SETTINGS.format(line=line))

    write()
    return write


def test_reload_changes_the_settings_of_a_running_server(start, configure, capfd):
    with start() as server:
        configure('metrics = true\nmodels = {alias = "scripted"}')
        assert main(["reload"]) == 0
        assert capfd.readouterr() == (
            f"{server.url} reloaded: models\n",
            "antiphon: warning: a restart is needed to change: metrics\n",
        )
        assert main(["models", "--url", server.url]) == 0
        assert "alias" in capfd.readouterr().out
        configure("quued = 1")
        assert main(["reload"]) == 1
        message = "antiphon.toml: unknown setting 'quued'. Did you mean queued?\n"
        assert capfd.readouterr() == ("", f"antiphon: The settings of {server.url} were not reloaded: {message}")
        failure = "the settings were not reloaded, the old ones stay in effect: "
        assert server.wait_for_log(failure).endswith(message)
        assert main(["models", "--url", server.url]) == 0
        assert "alias" in capfd.readouterr().out


def test_reload_without_the_settings_file_of_the_start_changes_nothing(start, configure, home, capfd):
    configure('api_keys = [{key = "sk-ada"}]')
    with start() as server:
        (home / "antiphon.toml").rename(home / "moved.toml")
        assert main(["reload", "--config", "moved.toml"]) == 1
        message = "were not reloaded: Cannot read antiphon.toml: No such file or directory.\n"
        assert capfd.readouterr() == ("", f"antiphon: The settings of {server.url} {message}")
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 401
        connection.close()


def test_reload_without_a_server_is_an_error(configure, home, capfd):
    assert main(["reload"]) == 1
    assert main(["reload", "--pid", "1"]) == 1
    message = f"runs with the data folder {home}/data. Use the settings of the server.\n"
    assert capfd.readouterr() == (
        "",
        f"antiphon: No server {message}antiphon: No server with the process id 1 {message}",
    )


def test_reload_with_several_servers_needs_the_process_id(configure, home, capfd):
    first = ServerFile.create(home / "data" / FOLDER, "http://127.0.0.1:1")
    (path,) = (home / "data" / FOLDER).iterdir()
    path.rename(path.with_name("1.json"))
    second = ServerFile.create(home / "data" / FOLDER, "http://127.0.0.1:2")
    assert main(["reload"]) == 1
    pid = os.getpid()
    assert capfd.readouterr().err == (
        f"antiphon: Several servers run with the data folder {home}/data: choose one with --pid: "
        f"{pid} (http://127.0.0.1:1), {pid} (http://127.0.0.1:2).\n"
    )
    first.remove()
    second.remove()


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "lambda *_: file.remove()"])
def test_reload_of_a_server_that_ends_or_stops_is_an_error_at_once(configure, home, capfd, handler):
    code = f"""
import signal, sys
from pathlib import Path
from antiphon.server.running_servers import ServerFile
signal.signal(signal.SIGHUP, {handler})
file = ServerFile.create(Path({str(home / "data" / FOLDER)!r}), "http://127.0.0.1:1")
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert main(["reload"]) == 1
        process.stdin.close()
    assert capfd.readouterr() == ("", "antiphon: The server http://127.0.0.1:1 has ended, or is stopping.\n")


def test_reader_finds_a_server_while_it_reports(home):
    file = ServerFile.create(home / FOLDER, "http://127.0.0.1:1")
    # A file of several pages is not written at once.
    results = [ReloadResult(error="long " * 40_000), ReloadResult(changes="short")]
    found = []
    reports = threading.Thread(target=lambda: [file.report(results[number % 2]) for number in range(2000)])
    reports.start()
    while reports.is_alive():
        found.append(find_server(home / FOLDER, os.getpid()))
    reports.join()
    assert None not in found
    assert find_server(home / FOLDER, os.getpid()).result == results[1]
    file.remove()


def test_file_of_a_dead_server_is_deleted(home):
    folder = home / FOLDER
    folder.mkdir()
    (folder / "4711.json").write_text('{"pid":4711,"machine":"m","url":"u"}')
    assert list_servers(folder) == []
    assert list(folder.iterdir()) == []


def test_server_stops_when_its_terminal_is_closed(terminal, script):
    server = terminal("serve", "--script", "script.json", "--port", "0", "--store", "memory:")
    server.read_until("Say hello.")
    server.read_until("\n")
    assert server.hang_up() == 0


def test_server_without_a_writable_data_folder_reloads_at_the_signal(start, configure, home):
    (home / "data").mkdir()
    (home / "data" / FOLDER).write_text("not a folder")
    with start() as server:
        configure("queued = 7")
        os.kill(server.pid, signal.SIGHUP)
        assert server.wait_for_log("reloaded: ").endswith("reloaded: queued\n")
