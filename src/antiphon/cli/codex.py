"""`antiphon codex`: the configuration that points Codex CLI at a server, printed or merged into what is there."""

import itertools
import shlex
import stat
import sys
from argparse import Namespace
from pathlib import Path

import msgspec

from antiphon.backends.registry import create
from antiphon.cli.codex_config import Connection, merge, write_catalogue
from antiphon.cli.server_client import ServedModel, ServerClient, ServerUnreachable
from antiphon.cli.settings import load_settings, read_secret, server_url
from antiphon.cli.toml_document import MergeError
from antiphon.config import Settings, environment
from antiphon.errors import AntiphonError, ConfigError


def run(arguments: Namespace) -> int:
    url, models = _find_models(arguments)
    connection = Connection(
        url=url,
        model=models[0],
        key_env=arguments.key_env,
        server_compaction=arguments.server_compaction,
    )
    if arguments.write:
        _write(connection, models, profile=arguments.profile)
    else:
        print(merge("", connection), end="")
        _note(f"This belongs into {_config_file(arguments.profile)}: --write merges it in, with a model catalogue.")
    return 0


def _find_models(arguments: Namespace) -> tuple[str, list[ServedModel]]:
    """The server's address and its models, the one to use first. What does not run is known by its settings."""
    key = read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None
    settings = None if arguments.url else load_settings(arguments)
    if settings is not None and settings.api_keys and key is None:
        raise ConfigError("The server wants a key: name the variable that will hold it for Codex with --key-env.")
    remote = ServerClient(arguments.url if settings is None else server_url(settings), key=key)
    try:
        models = remote.served_models()
    except ServerUnreachable as error:
        _note(error.message)
        models = [] if settings is None else _read_models(settings)
    return remote.url, _put_first(arguments.model, models, remote.url)


def _read_models(settings: Settings) -> list[ServedModel]:
    models: list[ServedModel] = []
    for name, chosen in settings.backends.items():
        try:
            backend = create(chosen.kind, name=name, options=chosen.options, data_dir=settings.data_dir)
            models += [ServedModel(model.id, model.context_window) for model in backend.models()]
        except ConfigError as error:
            _note(error.message)
    return models


def _put_first(wanted: str | None, models: list[ServedModel], url: str) -> list[ServedModel]:
    if wanted is None:
        if not models:
            raise AntiphonError(f"The models of {url} are not known: name the one to use with --model.")
        return models
    listed = [model for model in models if model.id == wanted]
    if models and not listed:
        _note(f"{url} does not list the model {wanted!r}.")
    return [*(listed or [ServedModel(wanted)]), *(model for model in models if model.id != wanted)]


def _config_file(profile: str | None) -> Path:
    env = environment()
    home = Path(env["CODEX_HOME"]) if env.get("CODEX_HOME") else Path(env.get("HOME") or Path.home()) / ".codex"
    return home.absolute() / (f"{profile}.config.toml" if profile else "config.toml")


def _write(connection: Connection, models: list[ServedModel], *, profile: str | None) -> None:
    path = _config_file(profile)
    catalogue = path.with_name(f"{profile or 'antiphon'}-models.json")
    before = _read(path)
    try:
        after = merge(before or "", msgspec.structs.replace(connection, catalogue=catalogue))
    except MergeError as error:
        raise AntiphonError(
            f"{path} is left as it is: {error.message}. Without --write you see what to put there."
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(catalogue, write_catalogue(models))
    if after == before:
        print(f"{path} says all that already.")
    else:
        kept = "" if before is None else f" The file as it was: {_back_up(path)}."
        _replace(path, after)
        print(f"{path} now points at {connection.url}.{kept}")
    command = ["codex", "--profile", profile] if profile else ["codex"]
    variable = f", with {connection.key_env} set" if connection.key_env else ""
    print(f"Run it{variable}: {shlex.join(command)}")


def _read(path: Path) -> str | None:
    try:
        # As bytes: reading text would change the ends of lines.
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise AntiphonError(f"{path} is left as it is: it is not UTF-8.") from None


def _back_up(path: Path) -> Path:
    """A copy beside the file, under a name that is free."""
    names = (path.with_name(f"{path.name}.bak{number}") for number in itertools.count(1))
    copy = next(name for name in names if not name.exists())
    _write_file(copy, path.read_bytes(), mode=_mode(path))
    return copy


def _replace(path: Path, text: str) -> None:
    """Write the file at once or not at all. A link stays one."""
    target = path.resolve()
    new = target.with_name(f"{target.name}.new")
    _write_file(new, text.encode(), mode=_mode(target))
    new.replace(target)


def _write_file(path: Path, content: bytes, *, mode: int) -> None:
    path.touch(mode)
    path.chmod(mode)
    path.write_bytes(content)


def _mode(path: Path) -> int:
    # The file may hold secrets, also those of other providers.
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600


def _note(text: str) -> None:
    print(f"antiphon: {text}", file=sys.stderr)
