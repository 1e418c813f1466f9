import io
import signal
import socket
import subprocess
import sys

import pytest

from antiphon.cli.main import main

COMMAND = [sys.executable, "-m", "antiphon"]


@pytest.fixture
def chat(monkeypatch, capsys):
    """Return a function that pipes text through `antiphon chat` and returns its exit status and output."""

    def pipe(text, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", *options])
        out, err = capsys.readouterr()
        return status, out, err

    return pipe


@pytest.fixture
def settings(home, script):
    """Configure the scripted model and a port on which no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: it refuses connections
        port = unused.getsockname()[1]
        (home / "antiphon.toml").write_text(
            f'port = {port}\n[backends.scripted]\nkind = "scripted"\nscript = "{script}"\n'
        )
        yield


@pytest.fixture(params=["remote", "local"])
def location(request):
    """Return the options to chat with a server, and with an engine in the process."""
    if request.param == "remote":
        return ["--url", request.getfixturevalue("server").url]
    request.getfixturevalue("settings")
    return ["--local"]


def test_piped_lines_are_turns_of_one_conversation(chat, location):
    assert chat("hello\n\nagain\n/new\nafresh\n/exit\nunread\n", *location) == (
        0,
        "You said: hello (1)\nYou said: again (3)\nYou said: afresh (1)\n",
        "",
    )


def test_failed_turn_is_reported_and_not_continued(chat, location):
    assert chat("hello\nfail\nrefuse\nagain\n", *location) == (
        1,
        "You said: hello (1)\nI begin\nYou said: again (3)\n",
        "antiphon: The model fell over.\nantiphon: Not that.\n",
    )


def test_incomplete_answer_shows_a_warning(chat, location):
    assert chat("long\n", *location) == (0, "and so on\n", "antiphon: the answer is incomplete: max_output_tokens\n")


def test_turn_with_a_tool_call_is_not_added(chat, location):
    assert chat("hello\ncall\nagain\n", *location) == (
        0,
        "You said: hello (1)\nYou said: again (3)\n",
        (
            'antiphon: the model calls look({"at":"it"}), but chat runs no tools; '
            "this turn is not added to the conversation\n"
        ),
    )


def test_pipe_gets_only_the_answer(chat, server):
    assert chat("think\ncolour\n", "--url", f"{server.url}/v1/") == (0, "Done.\n\x1b[31mred\x1b[0m\n", "")


def test_model_runs_in_process_without_a_server(chat, settings):
    assert chat("hello\n") == (0, "You said: hello (1)\n", "")


def test_configured_server_gets_its_configured_key(chat, serve, monkeypatch):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret:ada")
    with serve("--store", "memory:") as server:
        monkeypatch.setenv("ANTIPHON_PORT", server.url.rpartition(":")[2])
        assert chat("hello\n") == (0, "You said: hello (1)\n", "")
        assert "project=ada" in server.wait_for_log("POST /v1/responses 200")


def test_other_server_gets_only_the_named_key(chat, serve, monkeypatch):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret")
    monkeypatch.setenv("MY_KEY", "secret")
    with serve("--store", "memory:") as server:
        assert chat("hello\n", "--url", server.url) == (
            1,
            "",
            (
                "antiphon: No API key was given: send it in the header 'Authorization: Bearer KEY'. "
                "Use --key-env to name the environment variable with your API key.\n"
            ),
        )
        assert chat("hello\n", "--url", server.url, "--key-env", "MY_KEY") == (0, "You said: hello (1)\n", "")


def test_key_variable_may_be_named_like_a_setting(chat, server, monkeypatch):
    monkeypatch.setenv("ANTIPHON_MY_KEY", "anything")
    assert chat("hello\n", "--url", server.url, "--key-env", "ANTIPHON_MY_KEY") == (0, "You said: hello (1)\n", "")


def test_unset_key_variable_is_named_in_the_error(chat):
    assert chat("", "--url", "http://127.0.0.1:1", "--key-env", "NO_SUCH_KEY") == (
        1,
        "",
        "antiphon: --key-env: the environment variable NO_SUCH_KEY is not set.\n",
    )


def test_unknown_model_shows_the_error_of_the_server(chat, server):
    status, out, err = chat("hello\n", "--url", server.url, "--model", "other")
    assert (status, out) == (1, "")
    assert err == "antiphon: The model 'other' does not exist. Available models: 'scripted'.\n"


def test_bytes_that_are_not_utf8_are_replaced(server):
    done = subprocess.run([*COMMAND, "chat", "--url", server.url], input=b"caf\xe9\n", capture_output=True, check=True)
    assert done.stdout.decode() == "You said: caf� (1)\n"


def test_interrupt_ends_a_piped_chat_with_130(server):
    with subprocess.Popen(
        [*COMMAND, "chat", "--url", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"wait\n")
        process.stdin.flush()
        assert process.stdout.read(7) == b"One two"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal, location):
    screen = terminal("chat", *location)
    screen.read_until("> ")
    screen.type("hello\n")
    screen.read_until("You said: hello (1)\r\n> ")
    screen.type("wait\n")
    screen.read_until("One two")
    screen.type("\x03")
    screen.read_until("stopped; this turn is not added to the conversation")
    screen.read_until("> ")
    screen.type("again\n")
    screen.read_until("You said: again (3)\r\n> ")
    screen.type("/exit\n")
    assert screen.wait() == 0


def test_ctrl_c_cancels_the_response_on_the_server(terminal, serve):
    with serve("--store", "memory:") as server:
        screen = terminal("chat", "--url", server.url)
        screen.read_until("> ")
        screen.type("wait\n")
        screen.read_until("One two")
        screen.type("\x03")
        screen.read_until("stopped")
        assert "error=client_gone" in server.wait_for_log("POST /v1/responses")


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_ctrl_c_and_ctrl_d_leave_at_an_empty_prompt(terminal, server, key):
    screen = terminal("chat", "--url", server.url)
    screen.read_until("> ")
    assert screen.leave_with(key) == 0


def test_ctrl_c_drops_a_partial_line(terminal, server):
    screen = terminal("chat", "--url", server.url)
    screen.read_until("> ")
    screen.type("half a que")
    screen.read_until("half a que")
    screen.press("\x03", until="\n> ")
    screen.type("hello\n")
    screen.read_until("You said: hello (1)")


def test_terminal_dims_reasoning_and_drops_control_characters(terminal, server):
    screen = terminal("chat", "--url", server.url)
    assert f"scripted in {server.url}. /help lists the commands." in screen.read_until("> ")
    screen.type("think\n")
    screen.read_until("\x1b[2mLet me see.\x1b[0m\r\nDone.\r\n> ")
    screen.type("colour\n")
    screen.read_until("[31mred[0m\r\n> ")
    screen.type("/help\n")
    screen.read_until("/new    start a new conversation")
    screen.type("/sing\n")
    screen.read_until("unknown command /sing")
    screen.type("fail\n")
    screen.read_until("antiphon: The model fell over.\r\n> ")
