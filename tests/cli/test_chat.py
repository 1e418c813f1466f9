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
    """Pipe text through `antiphon chat`: its exit status, and what it wrote."""

    def pipe(text, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        status = main(["chat", *options])
        out, err = capsys.readouterr()
        return status, out, err

    return pipe


@pytest.fixture
def settings(home, script):
    """A configuration whose server does not run, with the scripted model."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody else gets this port meanwhile, and nobody listens
        port = unused.getsockname()[1]
        (home / "antiphon.toml").write_text(
            f'port = {port}\n[backends.scripted]\nkind = "scripted"\nscript = "{script}"\n'
        )
        yield


@pytest.fixture(params=["remote", "local"])
def place(request):
    """The same talk with a server and within the process."""
    if request.param == "remote":
        return ["--url", request.getfixturevalue("server").url]
    request.getfixturevalue("settings")
    return ["--local"]


def test_piped_lines_are_turns_of_one_conversation(chat, place):
    assert chat("hello\n\nagain\n/new\nafresh\n/exit\nunheard\n", *place) == (
        0,
        "You said: hello (1)\nYou said: again (3)\nYou said: afresh (1)\n",
        "",
    )


def test_a_turn_that_fails_is_reported_and_not_continued_from(chat, place):
    assert chat("hello\nfail\nrefuse\nagain\n", *place) == (
        1,
        "You said: hello (1)\nI begin\nYou said: again (3)\n",
        "antiphon: The model fell over.\nantiphon: Not that.\n",
    )


def test_an_answer_cut_short_is_said_to_be(chat, place):
    assert chat("long\n", *place) == (0, "and so on\n", "antiphon: the answer is cut short: max_output_tokens\n")


def test_a_call_that_nobody_answers_is_left_out(chat, place):
    assert chat("hello\ncall\nagain\n", *place) == (
        0,
        "You said: hello (1)\nYou said: again (3)\n",
        (
            'antiphon: the model calls look({"at":"it"}), which nobody here answers; '
            "this turn is left out of the conversation\n"
        ),
    )


def test_a_pipe_gets_the_answer_alone(chat, server):
    assert chat("think\ncolour\n", "--url", f"{server.url}/v1/") == (0, "Done.\n\x1b[31mred\x1b[0m\n", "")


def test_without_a_server_the_model_runs_in_the_process(chat, settings):
    assert chat("hello\n") == (0, "You said: hello (1)\n", "")


def test_the_configured_server_is_found_and_gets_its_key(chat, serve, monkeypatch):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret")
    with serve("--store", "memory:") as server:
        monkeypatch.setenv("ANTIPHON_PORT", server.url.rpartition(":")[2])
        assert chat("hello\n") == (0, "You said: hello (1)\n", "")
        assert "project=default" in server.wait_for_log("POST /v1/responses 200")


def test_a_server_elsewhere_gets_only_the_key_that_was_named(chat, serve, monkeypatch):
    monkeypatch.setenv("ANTIPHON_API_KEYS", "secret")
    monkeypatch.setenv("MY_KEY", "secret")
    with serve("--store", "memory:") as server:
        assert chat("hello\n", "--url", server.url) == (
            1,
            "",
            (
                "antiphon: No API key was given: send it in the header 'Authorization: Bearer KEY'. "
                "Name the variable that holds your key with --key-env.\n"
            ),
        )
        assert chat("hello\n", "--url", server.url, "--key-env", "MY_KEY") == (0, "You said: hello (1)\n", "")


def test_a_key_variable_may_look_like_a_setting(chat, server, monkeypatch):
    monkeypatch.setenv("ANTIPHON_MY_KEY", "anything")
    assert chat("hello\n", "--url", server.url, "--key-env", "ANTIPHON_MY_KEY") == (0, "You said: hello (1)\n", "")


def test_a_key_variable_that_is_not_set_is_named(chat):
    assert chat("", "--url", "http://127.0.0.1:1", "--key-env", "NO_SUCH_KEY") == (
        1,
        "",
        "antiphon: --key-env: the environment variable NO_SUCH_KEY is not set.\n",
    )


def test_a_model_that_the_server_lacks_is_refused_in_its_words(chat, server):
    status, out, err = chat("hello\n", "--url", server.url, "--model", "other")
    assert (status, out) == (1, "")
    assert err == "antiphon: The model 'other' does not exist. Available models: 'scripted'.\n"


def test_bytes_that_are_no_text_are_asked_all_the_same(server):
    done = subprocess.run([*COMMAND, "chat", "--url", server.url], input=b"caf\xe9\n", capture_output=True, check=True)
    assert done.stdout.decode() == "You said: caf� (1)\n"


def test_an_interrupt_ends_a_piped_chat_with_130(server):
    with subprocess.Popen(
        [*COMMAND, "chat", "--url", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"wait\n")
        process.stdin.flush()
        assert process.stdout.read(7) == b"One two"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == b""


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, place):
    screen = terminal("chat", *place)
    screen.read_until("> ")
    screen.type("hello\n")
    screen.read_until("You said: hello (1)\r\n> ")
    screen.type("wait\n")
    screen.read_until("One two")
    screen.type("\x03")
    screen.read_until("stopped; this turn is left out of the conversation")
    screen.read_until("> ")
    screen.type("again\n")
    screen.read_until("You said: again (3)\r\n> ")
    screen.type("/exit\n")
    assert screen.wait() == 0


def test_ctrl_c_makes_the_server_stop_the_model(terminal, serve):
    with serve("--store", "memory:") as server:
        screen = terminal("chat", "--url", server.url)
        screen.read_until("> ")
        screen.type("wait\n")
        screen.read_until("One two")
        screen.type("\x03")
        screen.read_until("stopped")
        assert "error=client_gone" in server.wait_for_log("POST /v1/responses")


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_ctrl_c_and_ctrl_d_leave_an_empty_prompt(terminal, server, key):
    screen = terminal("chat", "--url", server.url)
    screen.read_until("> ")
    assert screen.leave_with(key) == 0


def test_ctrl_c_drops_a_line_that_is_half_typed(terminal, server):
    screen = terminal("chat", "--url", server.url)
    screen.read_until("> ")
    screen.type("half a que")
    screen.read_until("half a que")
    screen.press("\x03", until="\n> ")
    screen.type("hello\n")
    screen.read_until("You said: hello (1)")


def test_a_terminal_gets_the_reasoning_dimmed_and_no_colours_of_the_model(terminal, server):
    screen = terminal("chat", "--url", server.url)
    assert f"scripted in {server.url}. /help lists the commands." in screen.read_until("> ")
    screen.type("think\n")
    screen.read_until("\x1b[2mLet me see.\x1b[0m\r\nDone.\r\n> ")
    screen.type("colour\n")
    screen.read_until("[31mred[0m\r\n> ")
    screen.type("/help\n")
    screen.read_until("/new    start over")
    screen.type("/sing\n")
    screen.read_until("there is no /sing")
    screen.type("fail\n")
    screen.read_until("antiphon: The model fell over.\r\n> ")
