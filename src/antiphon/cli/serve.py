"""`antiphon serve`: start the server."""

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from antiphon import __version__
from antiphon.cli.settings import reachable_url, read_settings, upstream_backend
from antiphon.config import Settings, hide_password
from antiphon.engine.assembly import build_engine
from antiphon.engine.engine import Engine
from antiphon.server.log import configure_logging
from antiphon.server.process import serve


def run(arguments: Namespace) -> int:
    backends = _choose_backends(arguments)
    settings = read_settings(
        arguments,
        host=arguments.host,
        port=arguments.port,
        store=arguments.store,
        stateless=arguments.stateless,
        insecure=arguments.insecure,
        backends=backends,
    )
    configure_logging(settings)
    engine = build_engine(settings)
    serve(engine, settings, on_ready=lambda url: print(format_banner(url, engine, settings), flush=True))
    return 0


def _choose_backends(arguments: Namespace) -> dict[str, dict[str, Any]] | None:
    """Return the backend that the options define, to replace the configured ones, or None if they define none."""
    upstream = upstream_backend(arguments)
    if upstream is not None:
        return upstream
    if arguments.script:
        return {"scripted": {"kind": "scripted", "script": str(arguments.script)}}
    if arguments.model:
        return {"embedded": {"kind": "embedded", **_parse_model(arguments.model)}}
    return None


def _parse_model(model: str) -> dict[str, str]:
    """Return the backend options for a .gguf file or a downloaded model. The file name names the model of a file."""
    path = Path(model)
    return {"model": path.stem, "weights": model} if path.suffix == ".gguf" else {"model": model}


def format_banner(url: str, engine: Engine, settings: Settings) -> str:
    models = [model.id for model in engine.models()]
    needs_key = bool(settings.api_keys) or engine.has_stored_keys
    keys = "required" if needs_key else "not required: anyone who can reach this address can use the server"
    lines = [
        f"antiphon {__version__} listens on {url}",
        f"  models  {', '.join(models) or 'unknown: the upstream does not list any'}",
        f"  data    {'not stored' if settings.stateless else hide_password(settings.store)}",
        f"  keys    {keys}",
        "Ctrl-C stops it. To try it, in another terminal:",
        f"  {_format_example(reachable_url(url), models[0] if models else 'NAME', needs_key=needs_key)}",
    ]
    return "\n".join(lines)


def _format_example(url: str, model: str, *, needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer YOUR_KEY"' if needs_key else ""
    body = json.dumps({"model": model, "input": "Say hello."})
    return f"curl {url}/v1/responses -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
