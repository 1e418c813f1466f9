"""`antiphon codex`: print the configuration of Codex CLI for a server, or merge it into its configuration file."""

import itertools
import shlex
import stat
import sys
from argparse import Namespace
from pathlib import Path

import msgspec

from antiphon.backends.registry import create
from antiphon.cli.codex_config import CodexOptions, format_catalogue, merge_config
from antiphon.cli.server_client import ListedModel, ServerClient, ServerUnreachable
from antiphon.cli.settings import load_settings, read_key, server_url
from antiphon.cli.toml_document import MergeError
from antiphon.config.loading import environment
from antiphon.config.settings import Settings
from antiphon.errors import AntiphonError, ConfigError


def run(arguments: Namespace) -> int:
    url, models = _find_models(arguments)
    options = CodexOptions(
        url=url,
        model=models[0],
        key_env=arguments.key_env,
        server_compaction=arguments.server_compaction,
    )
    if arguments.write:
        _write_config(options, models, profile=arguments.profile)
    else:
        print(merge_config("", options), end="")
        _note(f"--write merges this into {_config_file(arguments.profile)} and adds a model catalogue.")
    return 0


def _find_models(arguments: Namespace) -> tuple[str, list[ListedModel]]:
    """Return the URL of the server and its models, the default one first. If no server runs, use the settings."""
    key = read_key(arguments)
    settings = None if arguments.url else load_settings(arguments)
    if settings is not None and settings.api_keys and key is None:
        raise ConfigError("The server requires an API key: use --key-env to name the variable with it.")
    client = ServerClient(arguments.url if settings is None else server_url(settings), key=key)
    try:
        models = client.served_models()
    except ServerUnreachable as error:
        _note(error.message)
        models = [] if settings is None else _list_configured_models(settings)
    return client.url, _sort_models(arguments.model, models, client.url)


def _list_configured_models(settings: Settings) -> list[ListedModel]:
    models: list[ListedModel] = []
    for name, configured in settings.backends.items():
        try:
            backend = create(configured.kind, name=name, options=configured.options, data_dir=settings.data_dir)
            models += [ListedModel(model.id, model.context_window) for model in backend.models()]
        except ConfigError as error:
            _note(error.message)
    return models


def _sort_models(wanted: str | None, models: list[ListedModel], url: str) -> list[ListedModel]:
    if wanted is None:
        if not models:
            raise AntiphonError(f"The models of {url} are unknown: name one with --model.")
        return models
    listed = [model for model in models if model.id == wanted]
    if models and not listed:
        _note(f"{url} does not list the model {wanted!r}.")
    return [*(listed or [ListedModel(wanted)]), *(model for model in models if model.id != wanted)]


def _config_file(profile: str | None) -> Path:
    env = environment()
    home = Path(env["CODEX_HOME"]) if env.get("CODEX_HOME") else Path(env.get("HOME") or Path.home()) / ".codex"
    return home.absolute() / (f"{profile}.config.toml" if profile else "config.toml")


def _write_config(options: CodexOptions, models: list[ListedModel], *, profile: str | None) -> None:
    path = _config_file(profile)
    catalogue = path.with_name(f"{profile or 'antiphon'}-models.json")
    before = _read(path)
    try:
        after = merge_config(before or "", msgspec.structs.replace(options, catalogue=catalogue))
    except MergeError as error:
        raise AntiphonError(
            f"{path} is unchanged: {error.message}. Run the command without --write and add the values yourself."
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(catalogue, format_catalogue(models))
    if after == before:
        print(f"{path} is up to date.")
    else:
        backup = "" if before is None else f" Backup: {_back_up(path)}."
        _replace(path, after)
        print(f"{path} now uses {options.url}.{backup}")
    command = ["codex", "--profile", profile] if profile else ["codex"]
    variable = f", with {options.key_env} set" if options.key_env else ""
    print(f"Start Codex{variable}: {shlex.join(command)}")


def _read(path: Path) -> str | None:
    try:
        # Read as bytes: text mode would change the line endings.
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise AntiphonError(f"{path} is unchanged: it is not UTF-8.") from None


def _back_up(path: Path) -> Path:
    """Copy the file to an unused name next to it."""
    names = (path.with_name(f"{path.name}.bak{number}") for number in itertools.count(1))
    copy = next(name for name in names if not name.exists())
    _write_file(copy, path.read_bytes(), mode=_mode(path))
    return copy


def _replace(path: Path, text: str) -> None:
    """Write the file atomically. A symbolic link is followed, not replaced."""
    target = path.resolve()
    new = target.with_name(f"{target.name}.new")
    _write_file(new, text.encode(), mode=_mode(target))
    new.replace(target)


def _write_file(path: Path, content: bytes, *, mode: int) -> None:
    path.touch(mode)
    path.chmod(mode)
    path.write_bytes(content)


def _mode(path: Path) -> int:
    # A new file is private: it may later contain secrets of other providers.
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600


def _note(text: str) -> None:
    print(f"antiphon: {text}", file=sys.stderr)
