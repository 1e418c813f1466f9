"""`antiphon models`: what a server serves, or what the settings would make it serve."""

from argparse import Namespace

from antiphon.backends.registry import create
from antiphon.cli.remote import Remote
from antiphon.cli.settings import load_settings, read_secret


def run(arguments: Namespace) -> int:
    if arguments.url:
        key = read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None
        rows = [(model, arguments.url) for model in Remote(arguments.url, key=key).models()]
    else:
        rows = _read_configured(arguments)
    width = max((len(model) for model, _ in rows), default=0)
    for model, place in rows:
        print(f"{model:{width}}  {place}")
    return 0


def _read_configured(arguments: Namespace) -> list[tuple[str, str]]:
    """Each model and the backend that would answer for it; nothing is loaded for this."""
    settings = load_settings(arguments)
    rows: list[tuple[str, str]] = []
    for name, chosen in settings.backends.items():
        backend = create(chosen.kind, name=name, options=chosen.options, data_dir=settings.data_dir)
        rows += [(model.id, f"{name} ({chosen.kind})") for model in backend.models()]
    return rows
