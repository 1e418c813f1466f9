"""The arguments of all commands."""

import argparse
import math
import re
from pathlib import Path
from typing import Any, TypeAlias

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_DURATION = 36500 * 86400
_MAX_LABEL_LENGTH = 256
_MAX_USAGE_DAYS = 400


class Version(argparse.Action):
    """Like the version action of argparse, but looks the version up only when it is printed, because that is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from antiphon import __version__

        print(f"antiphon {__version__}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that takes `-1d` and `-1,2` as values, as argparse takes `-1`. Their error names the allowed values."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = re.compile(r"-\d")


def build_parser(name: str | None = None) -> Parser:
    """Return the parser of all commands, or of the one with this name, which takes a fifth of the time."""
    parser = Parser(
        prog="antiphon",
        description="Serve the Responses API on any model, chat in the terminal, and run agents.",
        epilog="To start: 'antiphon pull' gets a small model, 'antiphon serve' serves it, 'antiphon chat' uses it.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    adders = {
        "serve": _add_serve,
        "reload": _add_reload,
        "chat": _add_chat,
        "pull": _add_pull,
        "models": _add_models,
        "prompts": _add_prompts,
        "files": _add_files,
        "stores": _add_stores,
        "codex": _add_codex,
        "run": _add_run,
        "runs": _add_runs,
        "rotate": _add_rotate,
        "keys": _add_keys,
        "usage": _add_usage,
        "db": _add_db,
        "config": _add_config,
        "doctor": _add_doctor,
        "vacuum": _add_vacuum,
    }
    for add in [adders[name]] if name in adders else adders.values():
        add(commands)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def _add_command(commands: Commands, name: str, text: str, *, nested: bool = False) -> Parser:
    """Add a command. A nested command does not override options that were given to its parent command."""
    command = commands.add_parser(name, help=text, description=_make_sentence(text))
    command.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS if nested else None,
        metavar="FILE",
        help="settings file (default: antiphon.toml in the working directory, if it exists)",
    )
    return command


def _make_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_rotate(commands: Commands) -> None:
    _add_command(
        commands, "rotate", "create a new key for encrypted reasoning and compaction items; old items stay readable"
    )


def _add_vacuum(commands: Commands) -> None:
    _add_command(commands, "vacuum", "rewrite the store without unused space, while no server uses it")


def _add_serve(commands: Commands) -> None:
    command = _add_command(commands, "serve", "serve the Responses API over HTTP")
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    command.add_argument("--port", type=int, help="port to listen on (default: 8484; 0 selects a free port)")
    command.add_argument("--workers", type=int, metavar="N", help="number of processes that serve (default: 1)")
    command.add_argument(
        "--store",
        metavar="URL",
        help="store for responses: sqlite:///PATH, postgresql://HOST/NAME or memory: "
        "(default: a SQLite file in the data folder)",
    )
    command.add_argument(
        "--stateless",
        action="store_true",
        default=None,
        help="store nothing: requests must contain their whole history",
    )
    command.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="allow other machines without an API key: anyone who can reach the server can use it",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "--model", metavar="NAME", help="run this model in the server process: a downloaded model or a .gguf file"
    )
    source.add_argument(
        "--script", type=Path, metavar="FILE", help="serve scripted answers instead of a model, for tests and demos"
    )
    source.add_argument(
        "--upstream", metavar="URL", help="serve the models of another server, for example http://HOST:PORT/v1"
    )
    _add_upstream_options(command)


def _add_reload(commands: Commands) -> None:
    command = _add_command(commands, "reload", "make a running server read its settings again, and show the result")
    command.add_argument("--pid", type=_parse_count, metavar="N", help="process id, if several servers share the data")
    command.add_argument(
        "--timeout", type=_parse_seconds, default=60.0, metavar="SECONDS", help="time to wait (default: 60)"
    )


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _add_upstream_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--upstream-kind",
        choices=("chat", "responses", "anthropic"),
        help="API of the upstream (default: chat)",
    )
    command.add_argument(
        "--upstream-key-env", metavar="VAR", help="environment variable with the API key of the upstream"
    )


def _add_keys(commands: Commands) -> None:
    command = _add_command(commands, "keys", "create, list, revoke and rotate the API keys in the store")
    parts = command.add_subparsers(title="commands", metavar="COMMAND", dest="keys_command", required=True)
    create = _add_command(parts, "create", "create a key and print it; it cannot be shown again", nested=True)
    create.add_argument("--project", type=_parse_label, required=True, metavar="NAME", help="project of the key")
    create.add_argument("--name", type=_parse_label, metavar="TEXT", help="name, for the list of keys")
    create.add_argument(
        "--scope",
        action="append",
        choices=("inference", "read", "admin"),
        help="read: only GET; inference: also create and change data; admin: everything (default: inference); "
        "repeatable: the highest counts",
    )
    listed = _add_command(parts, "list", "list all keys, without the keys themselves", nested=True)
    revoke = _add_command(parts, "revoke", "revoke a key; running servers refuse it after 5 seconds", nested=True)
    rotate = _add_command(parts, "rotate", "replace a key by a new one with the same id and scopes", nested=True)
    for part in (revoke, rotate):
        part.add_argument("id", metavar="ID", help="id of the key")
    create.add_argument("--expires", type=_parse_duration, metavar="TIME", help="lifetime, for example 12h, 30d or 52w")
    rotate.add_argument(
        "--expires", type=_parse_duration, metavar="TIME", help="new lifetime, for example 30d (default: unchanged)"
    )
    for part in (create, listed, rotate):
        part.add_argument("--json", action="store_true", help="print JSON")
    for part in (create, listed, revoke, rotate):
        part.add_argument("--store", metavar="URL", help="URL of the store (default: the store of the settings)")


def _add_usage(commands: Commands) -> None:
    command = _add_command(commands, "usage", "show the requests, tokens and costs in the store")
    command.add_argument("--store", metavar="URL", help="URL of the store (default: the store of the settings)")
    command.add_argument(
        "--days",
        type=_parse_usage_days,
        default=7,
        metavar="N",
        help="number of days, including today (default: 7; at most 400)",
    )
    command.add_argument(
        "--by", choices=("project", "key", "model"), default="project", help="rows of the table (default: project)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _parse_usage_days(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= _MAX_USAGE_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 1 to {_MAX_USAGE_DAYS}")
    return int(text)


def _parse_label(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > _MAX_LABEL_LENGTH:
        raise argparse.ArgumentTypeError(f"{text!r} is not a line of 1 to {_MAX_LABEL_LENGTH} printable characters")
    return text


def _parse_duration(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([smhdw])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_DURATION:
        units = ", ".join(_UNITS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: a number of at least 1 and a unit ({units}), at most 36500d"
        )
    return seconds


def _add_db(commands: Commands) -> None:
    command = _add_command(commands, "db", "show, migrate, clean, export and import the store")
    parts = command.add_subparsers(title="commands", metavar="COMMAND", dest="db_command", required=True)
    texts = {
        "status": "show the schema version, the size and the number of rows",
        "migrate": "create the tables, or bring them to the version of this program",
        "expire": "delete expired data now",
        "export": "write all data as JSON, one row per line",
        "import": "read an export into an empty store; all ids stay the same",
    }
    for name, text in texts.items():
        part = _add_command(parts, name, text, nested=True)
        part.add_argument("--store", metavar="URL", help="URL of the store (default: the store of the settings)")
        if name == "status":
            part.add_argument("--json", action="store_true", help="print one JSON object")
        elif name == "export":
            part.add_argument(
                "--output", type=Path, metavar="FILE", help="new file to write to (default: standard output)"
            )
        elif name == "import":
            part.add_argument("file", nargs="?", type=Path, metavar="FILE", help="export (default: standard input)")


def _add_config(commands: Commands) -> None:
    command = _add_command(commands, "config", "check the settings")
    parts = command.add_subparsers(title="commands", metavar="COMMAND", dest="config_command", required=True)
    _add_command(parts, "check", "show all problems of the settings; nothing is started", nested=True)


def _add_doctor(commands: Commands) -> None:
    command = _add_command(
        commands, "doctor", "check the settings, store, keys, backends, extras, clock and port, and show what to do"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_chat(commands: Commands) -> None:
    command = _add_command(commands, "chat", "chat with a model in the terminal; in a pipe, each line is a turn")
    location = command.add_mutually_exclusive_group()
    location.add_argument("--url", help="address of the server (default: the configured server, if it is running)")
    location.add_argument("--local", action="store_true", help="run the model in this process, without a server")
    command.add_argument("--model", metavar="NAME", help="model to use (default: the first model of the server)")
    command.add_argument("--instructions", metavar="TEXT", help="system instructions for the model")
    command.add_argument("--key-env", metavar="VAR", help="environment variable with the API key of the server")


def _add_pull(commands: Commands) -> None:
    command = _add_command(commands, "pull", "download a model; an interrupted download is continued")
    command.add_argument("name", nargs="?", metavar="NAME", help="model to download (default: smollm2-135m)")
    command.add_argument("--list", action="store_true", help="list the available models and exit")


def _add_models(commands: Commands) -> None:
    command = _add_command(commands, "models", "list the models that 'antiphon serve' would serve, with their location")
    location = command.add_mutually_exclusive_group()
    location.add_argument("--url", help="list the models of this running server instead")
    location.add_argument("--upstream", metavar="URL", help="list the models of this upstream instead")
    command.add_argument("--key-env", metavar="VAR", help="environment variable with the API key of the server")
    _add_upstream_options(command)


def _add_prompts(commands: Commands) -> None:
    actions = _add_server_command(commands, "prompts", "define and show prompt templates on a running server")
    add = _add_action(actions, "add", "define a prompt, or a new version of one")
    add.add_argument("file", type=Path, metavar="FILE", help="template: a JSON file with parameters of a request")
    add.add_argument("--id", metavar="ID", help="id of the prompt (default: a new id)")
    _add_action(actions, "list", "list all versions of all prompts")
    show = _add_action(actions, "show", "print a prompt as JSON")
    show.add_argument("id", metavar="ID", help="id of the prompt")
    show.add_argument("--version", metavar="NAME", help="version to show (default: the newest)")


def _add_files(commands: Commands) -> None:
    actions = _add_server_command(commands, "files", "upload, list and delete files on a running server")
    add = _add_action(actions, "add", "upload files and print their ids")
    add.add_argument("files", type=Path, nargs="+", metavar="FILE", help="file to upload")
    add.add_argument("--purpose", default="user_data", help="purpose of the files (default: user_data)")
    add.add_argument(
        "--to", metavar="STORE", help="also add them to this vector store, and wait until they are indexed"
    )
    listed = _add_action(actions, "list", "list the files, newest first")
    listed.add_argument("--purpose", help="list only files with this purpose")
    remove = _add_action(actions, "rm", "delete files; they are removed from all vector stores")
    remove.add_argument("ids", nargs="+", metavar="ID", help="id of a file")


def _add_stores(commands: Commands) -> None:
    actions = _add_server_command(commands, "stores", "create, list and search vector stores on a running server")
    create = _add_action(actions, "create", "create a vector store and print its id")
    create.add_argument("name", metavar="NAME", help="name of the vector store")
    create.add_argument("files", type=Path, nargs="*", metavar="FILE", help="file to upload and index")
    _add_action(actions, "list", "list the vector stores, newest first")
    search = _add_action(actions, "search", "search a vector store")
    search.add_argument("id", metavar="ID", help="id of the vector store")
    search.add_argument("query", metavar="QUERY", help="question or key words")
    search.add_argument("--limit", type=int, default=5, metavar="N", help="maximum number of results (default: 5)")


def _add_codex(commands: Commands) -> None:
    command = _add_command(commands, "codex", "print the configuration of Codex CLI for a server")
    command.add_argument("--url", help="address of the server (default: the configured server, running or not)")
    command.add_argument("--model", metavar="NAME", help="model to use (default: the first model of the server)")
    command.add_argument("--key-env", metavar="VAR", help="environment variable with the API key of the server")
    command.add_argument("--profile", metavar="NAME", help="configure only 'codex --profile NAME'")
    command.add_argument(
        "--server-compaction",
        action="store_true",
        help="let the server compact long sessions; Codex then shows the provider as 'OpenAI'",
    )
    command.add_argument("--write", action="store_true", help="merge the configuration into the file of Codex")


def _add_run(commands: Commands) -> None:
    command = _add_command(commands, "run", "run an agent on a task; the run is stored and can be resumed")
    command.epilog = (
        "Exit status: 0 answer, 1 failure, 2 invalid arguments, 3 tool calls wait for approval, 4 limit reached, "
        "130 interrupted."
    )
    command.set_defaults(report_usage_error=command.error)
    subject = command.add_mutually_exclusive_group(required=True)
    subject.add_argument("task", nargs="?", metavar="TASK", help="the task; - reads it from standard input")
    subject.add_argument("--resume", metavar="RUN_ID", help="resume this run with its original options")
    _add_force(command)
    command.add_argument(
        "--tools",
        action="append",
        metavar="MODULE",
        help="load tools from module, module:name or file.py; repeatable",
    )
    command.add_argument(
        "--url", help="server with the model (default: the configured server if it runs, else this process)"
    )
    command.add_argument("--local", action="store_true", default=None, help="run the model in this process")
    command.add_argument("--key-env", metavar="VAR", help="environment variable with the API key of the server")
    command.add_argument("--model", metavar="NAME", help="model to use (default: the first available)")
    command.add_argument("--instructions", metavar="TEXT", help="system instructions for the model")
    command.add_argument("--max-turns", type=int, metavar="N", help="maximum number of turns (default: 20)")
    command.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of input and output tokens")
    command.add_argument("--deadline", type=float, metavar="SECONDS", help="maximum duration in seconds")
    command.add_argument(
        "--prices",
        type=_parse_prices,
        metavar="IN,OUT[,CACHED]",
        help="prices per million input, output and cached input tokens; with them the cost is shown",
    )
    command.add_argument("--currency", metavar="CODE", help="currency of the prices (default: USD)")
    _add_approval_and_format(command)


def _add_approval_and_format(command: argparse.ArgumentParser) -> None:
    command.add_argument("--yes", action="store_true", help="approve every tool call that needs approval")
    command.add_argument(
        "--repeat-interrupted",
        action="store_true",
        help="repeat calls that were running when the run was interrupted, and may have taken effect",
    )
    command.add_argument("--json", action="store_true", help="print the events of the run as JSON, one per line")


def _parse_prices(text: str) -> tuple[float, ...]:
    try:
        prices = tuple(float(price) for price in text.split(","))
    except ValueError:
        prices = ()
    if len(prices) not in (2, 3) or not all(0 <= price < math.inf for price in prices):
        raise argparse.ArgumentTypeError(f"{text!r} is not IN,OUT or IN,OUT,CACHED with numbers of at least 0")
    return prices


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _parse_days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1
    if not 0 <= days < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


def _add_runs(commands: Commands) -> None:
    command = _add_command(commands, "runs", "list the runs of agents, newest first; show, resume or delete one")
    actions = command.add_subparsers(title="actions", metavar="ACTION", dest="action")
    listed = _add_command(actions, "list", "list the runs, newest first (the default)", nested=True)
    listed.add_argument("--limit", type=_parse_count, metavar="N", help="maximum number of runs (default: 100)")
    listed.add_argument("--state", metavar="STATE", help="list only the runs in this state, for example interrupted")
    listed.add_argument("--json", action="store_true", help="print the runs as JSON, one per line")
    listed.set_defaults(report_usage_error=listed.error)
    show = _add_command(actions, "show", "print the steps of a run", nested=True)
    show.add_argument("--json", action="store_true", help="print the run as JSON")
    _add_delete_and_prune(actions)
    resume = _add_command(actions, "resume", "resume a run with its original options", nested=True)
    for action in (show, resume):
        action.add_argument("id", metavar="RUN_ID", help="id of the run")
    _add_force(resume)
    _add_approval_and_format(resume)


def _add_delete_and_prune(actions: Commands) -> None:
    delete = _add_command(actions, "delete", "delete runs with their steps", nested=True)
    delete.add_argument("ids", nargs="+", metavar="RUN_ID", help="id of a run")
    delete.add_argument("--force", action="store_true", help="delete a run even if a process executes it")
    prune = _add_command(actions, "prune", "delete old runs: by default those that cannot be resumed", nested=True)
    prune.add_argument(
        "--older-than", type=_parse_days, required=True, metavar="DAYS", help="days since the last step of a run"
    )
    prune.add_argument("--all", action="store_true", help="also delete runs that could be resumed")
    prune.add_argument("--state", action="append", metavar="STATE", help="delete only runs in this state; repeatable")
    prune.add_argument("--dry-run", action="store_true", help="print the runs and delete nothing")
    prune.set_defaults(report_usage_error=prune.error)


def _add_force(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--force", action="store_true", help="take the run over from a process that executes it; that process stops"
    )


def _add_server_command(commands: Commands, name: str, text: str) -> Commands:
    """Add a command whose actions use a running server. Return its actions, for `_add_action`."""
    command = commands.add_parser(name, help=text, description=_make_sentence(text))
    return command.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)


def _add_action(actions: Commands, name: str, text: str) -> argparse.ArgumentParser:
    action = _add_command(actions, name, text)
    action.add_argument("--url", help="address of the server (default: the configured server)")
    action.add_argument("--key-env", metavar="VAR", help="environment variable with the API key of the server")
    return action
