import json
import shutil
import socket
import subprocess

import pytest

from antiphon import __version__
from antiphon.cli.main import main


def test_banner_shows_address_models_data_and_keys(serve, home):
    with serve() as server:
        assert server.banner == [
            f"antiphon {__version__} listens on {server.url}",
            "  models  scripted",
            f"  data    sqlite:///{home}/.local/share/antiphon/antiphon.db",
            "  keys    not required: anyone who can reach this address can use the server",
            "Ctrl-C stops it. To try it, in another terminal:",
            (
                f"  curl {server.url}/v1/responses -H 'Content-Type: application/json' "
                """-d '{"model": "scripted", "input": "Say hello."}'"""
            ),
        ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_printed_curl_command_works(server):
    done = subprocess.run(["bash", "-c", f"{server.banner[-1]} -s"], capture_output=True, check=True)
    assert json.loads(done.stdout)["output"][0]["content"][0]["text"] == "You said: Say hello. (1)"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_printed_curl_command_works_with_key_and_wildcard_address(serve, monkeypatch):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret-key")
    with serve("--host", "0.0.0.0", "--store", "memory:") as server:
        assert server.banner[3] == "  keys    required"
        assert "secret-key" not in "".join(server.banner)
        line = server.banner[-1].replace("YOUR_KEY", "secret-key")
        done = subprocess.run(["bash", "-c", f"{line} -s"], capture_output=True, check=True)
        assert json.loads(done.stdout)["status"] == "completed"


def test_server_on_other_addresses_needs_a_key(script, capfd):
    assert main(["serve", "--script", str(script), "--host", "0.0.0.0", "--port", "0", "--store", "memory:"]) == 1
    assert capfd.readouterr() == (
        "",
        (
            "antiphon: host: 0.0.0.0 is reachable from other machines, and the server has no API key. Create one "
            "with 'antiphon keys create', set api_keys (ANTIPHON_API_KEYS), or listen on 127.0.0.1. To let anyone who "
            "can reach the server use it, pass --insecure (insecure = true).\n"
        ),
    )


def test_server_on_other_addresses_starts_with_a_key_in_the_store(serve, home):
    store = f"sqlite:///{home}/keys.db"
    assert main(["keys", "create", "--project", "p", "--store", store]) == 0
    with serve("--host", "0.0.0.0", "--store", store) as server:
        assert server.banner[3] == "  keys    required"


def test_insecure_server_on_other_addresses_starts_with_a_warning(serve, home):
    with (home / "log").open("w") as log, serve("--host", "0.0.0.0", "--insecure", "--store", "memory:", log=log):
        pass
    assert "insecure: anyone who can reach 0.0.0.0 can use this server, because it has no API keys" in (
        (home / "log").read_text()
    )


def test_server_starts_among_the_variables_of_a_kubernetes_service(serve, home, monkeypatch):
    monkeypatch.setenv("ANTIPHON_PORT", "tcp://10.0.0.1:8484")
    monkeypatch.setenv("ANTIPHON_SERVICE_HOST", "10.0.0.1")
    with (home / "log").open("w") as log, serve("--store", "memory:", log=log):
        pass
    assert "Ignored as addresses of a Kubernetes Service: ANTIPHON_PORT, ANTIPHON_SERVICE_HOST." in (
        (home / "log").read_text()
    )


def test_banner_of_a_stateless_server_shows_no_data(serve, home):
    with serve("--stateless") as server:
        assert server.banner[2] == "  data    not stored"
        assert not (home / ".local/share/antiphon/antiphon.db").exists()


def test_limits_without_stored_counts_are_a_warning_of_the_server_only(serve, home, capfd):
    (home / "antiphon.toml").write_text("stateless = true\n[limits]\ntokens_per_month = 1000")
    with (home / "log").open("w") as log, serve("--workers", "2", log=log):
        pass
    lines = [line for line in (home / "log").read_text().splitlines() if " warning limits.tokens_per_month: " in line]
    assert ["each of the 2 workers" in line for line in lines] == [True, False]
    assert main(["rotate"]) == 0
    assert "tokens_per_month" not in capfd.readouterr().err


def test_port_in_use_is_one_line_and_exit_1(script, capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--script", str(script), "--port", str(port), "--store", "memory:"]) == 1
    assert capfd.readouterr() == (
        "",
        f"antiphon: Port {port} on 127.0.0.1 is in use. Stop the other program, or choose another port.\n",
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--upstream", "127.0.0.1:1"], "backends.upstream.base_url: not the address of a server"),
        (["--upstream-kind", "chat"], "--upstream-kind requires --upstream with the URL of the upstream."),
        (["--upstream-key-env", "UNSET_KEY"], "--upstream-key-env requires --upstream with the URL of the upstream."),
        (
            ["--upstream", "http://127.0.0.1:1/v1", "--upstream-key-env", "UNSET_KEY"],
            "--upstream-key-env: the environment variable UNSET_KEY is not set.",
        ),
        (["--script", "nowhere.json"], "nowhere.json"),
        (["--script", "{script}", "--store", "papyrus:"], "There is no 'papyrus' store."),
        (["--port", "99999"], "--port: "),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_failed_start_is_one_line_and_exit_1(options, reason, script, capfd):
    assert main(["serve", "--port", "0", *(option.format(script=script) for option in options)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("antiphon: ")
    assert err.count("\n") == 1
    assert reason in err
