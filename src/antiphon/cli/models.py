"""`antiphon models`: list the models of a server or of the configured backends."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from antiphon.backends.base import Backend, Model
from antiphon.backends.embedded.weights import find_weights
from antiphon.backends.registry import create
from antiphon.cli.server_client import ServerClient
from antiphon.cli.settings import load_settings, read_key, upstream_backend
from antiphon.config.settings import BackendSettings, Settings
from antiphon.errors import ConfigError
from antiphon.text_table import format_table

Rows = list[tuple[str, str]]
"""The id of a model and its location."""


def run(arguments: Namespace) -> int:
    if arguments.url:
        client = ServerClient(arguments.url, key=read_key(arguments))
        _print_table([(model, client.shown_url) for model in client.models()])
        return 0
    settings = load_settings(arguments, backends=upstream_backend(arguments))
    rows: Rows = []
    problems: list[str] = []
    for name, backend in settings.backends.items():
        try:
            rows += _list_models(name, backend, settings)
        except ConfigError as error:
            problems.append(f"antiphon: {error.message}")
    _print_table(rows)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def _list_models(name: str, configured: BackendSettings, settings: Settings) -> Rows:
    """Return the models of a backend. Start the backend only if it cannot list them otherwise: that may be slow."""
    backend = create(configured.kind, name=name, options=configured.options, data_dir=settings.data_dir)
    models = backend.models() or asyncio.run(_start_and_list(backend))
    if not models:
        raise ConfigError(f"backends.{name}: the upstream does not list any models.")
    return [(model.id, f"{name} ({_describe_location(model.id, configured, settings)})") for model in models]


async def _start_and_list(backend: Backend) -> Sequence[Model]:
    await backend.start()
    try:
        return backend.models()
    finally:
        await backend.close()


def _describe_location(model: str, backend: BackendSettings, settings: Settings) -> str:
    if backend.kind != "embedded":
        return backend.kind
    path = backend.options.get("weights")
    return str(find_weights(model, path=Path(path) if path else None, folder=settings.data_dir / "models"))


def _print_table(rows: Rows) -> None:
    for line in format_table(rows):
        print(line)
