"""`antiphon models`: what a server serves, or what the settings would make it serve."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from antiphon.backends.base import Backend, Model
from antiphon.backends.embedded.weights import find_weights
from antiphon.backends.registry import create
from antiphon.cli.server_client import ServerClient
from antiphon.cli.settings import choose_upstream, load_settings, read_secret
from antiphon.config import BackendSettings, Settings
from antiphon.errors import ConfigError

Rows = list[tuple[str, str]]
"""A model, and where it is."""


def run(arguments: Namespace) -> int:
    if arguments.url:
        key = read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None
        _print([(model, arguments.url) for model in ServerClient(arguments.url, key=key).models()])
        return 0
    settings = load_settings(arguments, backends=choose_upstream(arguments))
    rows: Rows = []
    problems: list[str] = []
    for name, chosen in settings.backends.items():
        try:
            rows += _read_backend(name, chosen, settings)
        except ConfigError as error:
            problems.append(f"antiphon: {error.message}")
    _print(rows)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _read_backend(name: str, chosen: BackendSettings, settings: Settings) -> Rows:
    """The models of one backend. It is not started, so that nothing is loaded, unless it has to ask for them."""
    backend = create(chosen.kind, name=name, options=chosen.options, data_dir=settings.data_dir)
    models = backend.models() or asyncio.run(_ask(backend))
    if not models:
        raise ConfigError(f"backends.{name}: its server does not list any models.")
    return [(model.id, f"{name} ({_describe(model.id, chosen, settings)})") for model in models]


async def _ask(backend: Backend) -> Sequence[Model]:
    await backend.start()
    try:
        return backend.models()
    finally:
        await backend.close()


def _describe(model: str, chosen: BackendSettings, settings: Settings) -> str:
    if chosen.kind != "embedded":
        return chosen.kind
    path = chosen.options.get("weights")
    return str(find_weights(model, path=Path(path) if path else None, folder=settings.data_dir / "models"))


def _print(rows: Rows) -> None:
    width = max((len(model) for model, _ in rows), default=0)
    for model, place in rows:
        print(f"{model:{width}}  {place}")
