import http.client
import os
import signal

import pytest

from antiphon.cli.main import main
from antiphon.server.running_servers import FOLDER, ServerFile, list_servers

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
