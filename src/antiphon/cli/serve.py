"""`antiphon serve`: the settings become an engine, the engine a server."""

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from antiphon import __version__
from antiphon.cli.settings import choose_upstream, load_settings, reachable_url
from antiphon.config import Settings, hide_password
from antiphon.engine.assembly import build_engine
from antiphon.engine.engine import Engine
from antiphon.server.log import configure_logging
from antiphon.server.process import serve


def run(arguments: Namespace) -> int:
    backends = _choose_backends(arguments)
    settings = load_settings(
        arguments,
        host=arguments.host,
        port=arguments.port,
        store=arguments.store,
        stateless=arguments.stateless,
        backends=backends,
    )
    configure_logging(settings)
    engine = build_engine(settings)
    serve(engine, settings, on_ready=lambda url: print(introduce(url, engine, settings), flush=True))
    return 0


def _choose_backends(arguments: Namespace) -> dict[str, dict[str, Any]] | None:
    """The backend that the options name in place of the configured ones, if they do."""
    upstream = choose_upstream(arguments)
    if upstream is not None:
        return upstream
    if arguments.script:
        return {"scripted": {"kind": "scripted", "script": str(arguments.script)}}
    if arguments.model:
        return {"embedded": {"kind": "embedded", **_name_weights(arguments.model)}}
    return None


def _name_weights(model: str) -> dict[str, str]:
    """A file goes by its name without the ending; anything else is the name of weights that were pulled."""
    path = Path(model)
    return {"model": path.stem, "weights": model} if path.suffix == ".gguf" else {"model": model}


def introduce(url: str, engine: Engine, settings: Settings) -> str:
    """What a newcomer wants to know of a server that has just started."""
    models = [model.id for model in engine.models()]
    lines = [
        f"antiphon {__version__} listens on {url}",
        f"  models  {', '.join(models) or 'none is known: the upstream does not list any'}",
        f"  data    {'none is kept' if settings.stateless else hide_password(settings.store)}",
        f"  keys    {'required' if settings.api_keys else 'not required: whoever reaches this address is let in'}",
        "Ctrl-C stops it. To try it, in another terminal:",
        f"  {_example(reachable_url(url), models[0] if models else 'NAME', keyed=bool(settings.api_keys))}",
    ]
    return "\n".join(lines)


def _example(url: str, model: str, *, keyed: bool) -> str:
    key = ' -H "Authorization: Bearer YOUR_KEY"' if keyed else ""
    body = json.dumps({"model": model, "input": "Say hello."})
    return f"curl {url}/v1/responses -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
