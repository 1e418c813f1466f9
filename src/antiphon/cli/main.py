"""The command line: what was typed, and which command that is. A command is a module, imported when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from antiphon.errors import AntiphonError

INTERRUPTED = 130


class Version(argparse.Action):
    """Like argparse's own, but the version is looked up only when asked for: that takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from antiphon import __version__

        print(f"antiphon {__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antiphon",
        description="The Responses API on any model: a server, a chat in the terminal, and a model to begin with.",
        epilog="A first try: 'antiphon pull' for a small model, 'antiphon serve', and 'antiphon chat' next to it.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and leave")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_pull(commands)
    _add_models(commands)
    _add_prompts(commands)
    _add_codex(commands)
    _add_run(commands)
    _add_runs(commands)
    _add_command(
        commands, "rotate", "make a new key for the content that clients carry sealed; the old ones still open it"
    )
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_command(commands: Commands, name: str, text: str, *, nested: bool = False) -> argparse.ArgumentParser:
    """Add a command. A nested one stands within another that has the same options: what was given there stays given."""
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS if nested else None,
        metavar="FILE",
        help="read the settings from FILE (default: antiphon.toml, if there is one)",
    )
    return command


def _add_serve(commands: Commands) -> None:
    command = _add_command(commands, "serve", "serve the Responses API over HTTP")
    command.add_argument("--host", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    command.add_argument("--port", type=int, help="the port to listen on (default: 8484; 0 picks a free one)")
    command.add_argument(
        "--store",
        metavar="URL",
        help="where responses are kept: sqlite:///PATH or memory: (default: a file of its own)",
    )
    command.add_argument(
        "--stateless",
        action="store_true",
        default=None,
        help="keep nothing: requests must bring their whole history",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "--model", metavar="NAME", help="serve this model in this process: one you pulled, or a .gguf file"
    )
    source.add_argument(
        "--script", type=Path, metavar="FILE", help="serve scripted answers instead of a model: for demos"
    )
    source.add_argument("--upstream", metavar="URL", help="serve the models of another server, at http://HOST:PORT/v1")
    _add_upstream_details(command)


def _add_upstream_details(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--upstream-kind",
        choices=("chat", "responses", "anthropic"),
        help="the API that the upstream speaks (default: chat)",
    )
    command.add_argument("--upstream-key-env", metavar="VAR", help="the environment variable that holds its key")


def _add_chat(commands: Commands) -> None:
    command = _add_command(commands, "chat", "talk to a model in the terminal; piped, each line is a turn")
    place = command.add_mutually_exclusive_group()
    place.add_argument("--url", help="the server to talk to (default: the one on this machine, if it runs)")
    place.add_argument("--local", action="store_true", help="run the model in this process, even if a server runs")
    command.add_argument("--model", metavar="NAME", help="the model to talk to (default: the server's first)")
    command.add_argument("--instructions", metavar="TEXT", help="what the model is told before every turn")
    command.add_argument("--key-env", metavar="VAR", help="the environment variable that holds the server's API key")


def _add_pull(commands: Commands) -> None:
    command = _add_command(commands, "pull", "download a model's weights; a download that broke off is continued")
    command.add_argument("name", nargs="?", metavar="NAME", help="which weights (default: smollm2-135m)")
    command.add_argument("--list", action="store_true", help="say what there is to pull, and leave")


def _add_models(commands: Commands) -> None:
    command = _add_command(commands, "models", "list the models that 'antiphon serve' would serve, and where they are")
    place = command.add_mutually_exclusive_group()
    place.add_argument("--url", help="ask this running server instead")
    place.add_argument("--upstream", metavar="URL", help="as with 'antiphon serve --upstream URL'")
    command.add_argument("--key-env", metavar="VAR", help="the environment variable that holds the server's API key")
    _add_upstream_details(command)


def _add_prompts(commands: Commands) -> None:
    text = "define and read the prompt templates of a running server"
    actions = commands.add_parser("prompts", help=text, description=f"{text[0].upper()}{text[1:]}.").add_subparsers(
        title="actions", metavar="ACTION", dest="action", required=True
    )
    add = _add_action(actions, "add", "define a prompt, or a new version of one")
    add.add_argument("file", type=Path, metavar="FILE", help="the template: a request in part, as JSON")
    add.add_argument("--id", metavar="ID", help="the prompt's id (default: a new one)")
    _add_action(actions, "list", "list every version of every prompt")
    show = _add_action(actions, "show", "print a prompt as JSON")
    show.add_argument("id", metavar="ID", help="the prompt's id")
    show.add_argument("--version", metavar="NAME", help="which version (default: the newest)")


def _add_codex(commands: Commands) -> None:
    command = _add_command(commands, "codex", "print the configuration that points Codex CLI at a server")
    command.add_argument("--url", help="the server (default: the one that these settings start on this machine)")
    command.add_argument("--model", metavar="NAME", help="the model to use (default: the server's first)")
    command.add_argument("--key-env", metavar="VAR", help="the environment variable that holds the server's API key")
    command.add_argument("--profile", metavar="NAME", help="for 'codex --profile NAME', not for every 'codex'")
    command.add_argument(
        "--server-compaction",
        action="store_true",
        help="let the server shorten long sessions; Codex then calls the provider 'OpenAI'",
    )
    command.add_argument("--write", action="store_true", help="merge it into Codex's own configuration")


def _add_run(commands: Commands) -> None:
    command = _add_command(commands, "run", "have an agent work on a task; what it did is kept, so that it can go on")
    command.epilog = (
        "Exit status: 0 for an answer, 1 for a failure, 2 for a misspelt command line, 3 for calls that wait for "
        "approval, 4 for a limit that was reached, 130 for an interrupt."
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("task", nargs="?", metavar="TASK", help="what to do; - reads it from the standard input")
    what.add_argument("--resume", metavar="RUN_ID", help="go on with this run, as it was started")
    command.add_argument(
        "--tools", action="append", metavar="MODULE", help="load tools from module, module:name or file.py; repeatable"
    )
    command.add_argument("--url", help="the server that has the model (default: run the model in this process)")
    command.add_argument("--key-env", metavar="VAR", help="the environment variable that holds the server's API key")
    command.add_argument("--model", metavar="NAME", help="the model to use (default: the first there is)")
    command.add_argument("--instructions", metavar="TEXT", help="what the model is told before every turn")
    command.add_argument("--max-turns", type=int, metavar="N", help="how many turns it may take (default: 20)")
    command.add_argument("--max-tokens", type=int, metavar="N", help="how many tokens it may use, read and said")
    command.add_argument("--deadline", type=float, metavar="SECONDS", help="how long it may take")
    command.add_argument(
        "--prices",
        type=_read_prices,
        metavar="IN,OUT",
        help="what a million tokens cost, read and said: the cost is shown then",
    )
    _add_manner(command)


def _add_manner(command: argparse.ArgumentParser) -> None:
    command.add_argument("--yes", action="store_true", help="approve every call that asks for approval")
    command.add_argument("--json", action="store_true", help="print what happens as lines of JSON")


def _read_prices(text: str) -> tuple[float, float]:
    read, said = text.split(",")
    return float(read), float(said)


def _add_runs(commands: Commands) -> None:
    command = _add_command(commands, "runs", "list the runs of agents, the newest first; show one, or go on with it")
    actions = command.add_subparsers(title="actions", metavar="ACTION", dest="action")
    show = _add_command(actions, "show", "print what a run has done", nested=True)
    resume = _add_command(actions, "resume", "go on with a run, as it was started", nested=True)
    for action in (show, resume):
        action.add_argument("id", metavar="RUN_ID", help="the run's id")
    _add_manner(resume)


def _add_action(actions: Commands, name: str, text: str) -> argparse.ArgumentParser:
    action = _add_command(actions, name, text)
    action.add_argument("--url", help="the server to talk to (default: the one on this machine)")
    action.add_argument("--key-env", metavar="VAR", help="the environment variable that holds the server's API key")
    return action


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. 0 is success, 1 failure, 2 a misspelt command line, 130 an interrupt; `run` has more to tell."""
    try:
        arguments = build_parser().parse_args(argv)
        command = importlib.import_module(f"antiphon.cli.{arguments.command}")
        status: int = command.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough. What is still buffered must go somewhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AntiphonError, OSError) as error:
        print(f"antiphon: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return status
