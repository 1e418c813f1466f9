"""`antiphon serve`: start the server, in this process or in several workers.

The modules of the server are imported by the process that needs them: the supervisor of workers needs few.
"""

import functools
import json
import logging
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from antiphon import __version__
from antiphon.cli.settings import reachable_url, read_settings, upstream_backend
from antiphon.config.loading import describe_doubtful_limits, find_file
from antiphon.config.readers import hide_password
from antiphon.config.settings import Settings
from antiphon.server.reload import hold_signal

logger = logging.getLogger(__name__)


def run(arguments: Namespace) -> int:
    # A reload without the file of the start would continue with the defaults, which have no API keys.
    arguments.config = find_file(arguments.config)
    load_settings = functools.partial(_load_settings, arguments)
    with hold_signal():
        settings = load_settings()
        if settings.workers > 1:
            _serve_with_workers(settings, load_settings)
        else:
            _serve(settings, load_settings)
    return 0


def _load_settings(arguments: Namespace) -> Settings:
    settings = read_settings(
        arguments,
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        store=arguments.store,
        stateless=arguments.stateless,
        insecure=arguments.insecure,
        backends=_choose_backends(arguments),
    )
    return msgspec.structs.replace(settings, warnings=(*settings.warnings, *describe_doubtful_limits(settings)))


def _serve(settings: Settings, load_settings: Callable[[], Settings]) -> None:
    from antiphon.engine.assembly import build_engine
    from antiphon.server.log import configure_logging
    from antiphon.server.process import serve

    configure_logging(settings)
    engine = build_engine(settings)

    def print_banner(url: str) -> None:
        models = [model.id for model in engine.models()]
        needs_key = bool(settings.api_keys) or engine.has_stored_keys
        print(format_banner(url, settings, models, needs_key=needs_key), flush=True)

    serve(engine, settings, on_ready=print_banner, load_settings=load_settings)


def _serve_with_workers(settings: Settings, load_settings: Callable[[], Settings]) -> None:
    from antiphon.server.listener import bind_socket, format_url
    from antiphon.server.log import configure_logging
    from antiphon.server.workers.messages import WorkerReady
    from antiphon.server.workers.supervisor import Supervisor

    configure_logging(settings)
    for name, backend in settings.backends.items():
        if backend.kind == "embedded":
            logger.warning(
                "each of the %d workers runs the model of the backend %r itself: they share the weights and the "
                "processors, but each needs memory for its contexts (250 MB for smollm2-135m)",
                settings.workers,
                name,
            )
    with bind_socket(settings) as listener:
        url = format_url(listener)

        def print_banner(ready: WorkerReady) -> None:
            print(format_banner(url, settings, ready.models, needs_key=ready.needs_key), flush=True)

        Supervisor(settings, listener, on_ready=print_banner, load_settings=load_settings).run()


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


def format_banner(url: str, settings: Settings, models: Sequence[str], *, needs_key: bool) -> str:
    keys = "required" if needs_key else "not required: anyone who can reach this address can use the server"
    lines = [
        f"antiphon {__version__} listens on {url}",
        f"  models  {', '.join(models) or 'unknown: the upstream does not list any'}",
        f"  data    {'not stored' if settings.stateless else hide_password(settings.store)}",
        f"  keys    {keys}",
        *([f"  workers {settings.workers}"] if settings.workers > 1 else []),
        "Ctrl-C stops it. To try it, in another terminal:",
        f"  {_format_example(reachable_url(url), models[0] if models else 'NAME', needs_key=needs_key)}",
    ]
    return "\n".join(lines)


def _format_example(url: str, model: str, *, needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer YOUR_KEY"' if needs_key else ""
    body = json.dumps({"model": model, "input": "Say hello."})
    return f"curl {url}/v1/responses -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
