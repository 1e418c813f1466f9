"""`antiphon config check`: show all problems of the settings without starting anything."""

import asyncio
from argparse import Namespace
from collections.abc import Iterator

from antiphon.backends.registry import create
from antiphon.cli.secrets import hide_secrets
from antiphon.cli.settings import read_settings
from antiphon.cli.stored_keys import has_stored_keys
from antiphon.config.limits import lacks_default_price
from antiphon.config.loading import describe_doubtful_limits, find_file
from antiphon.config.readers import ConfigProblems, ProblemCollector, hide_password
from antiphon.config.settings import Settings
from antiphon.engine.assembly import make_containers
from antiphon.engine.sealing import read_secrets
from antiphon.engine.serve.routing import parse_target
from antiphon.errors import ConfigError
from antiphon.server.agent import load_agent_tools
from antiphon.server.exposure import check_exposure
from antiphon.store.limits import StoreLimits
from antiphon.store.location import locate_store
from antiphon.tools.hosted.base import HostedSetup
from antiphon.tools.hosted.registry import create_hosted_tools
from antiphon.upstream.addresses import OutboundRules

_UNPRICED = 'cost_per_month: models without a price cost nothing. [prices."*"] is a price for all of them.'


def run(arguments: Namespace) -> int:
    try:
        settings = read_settings(arguments)
    except ConfigProblems as error:
        problems, warnings, summary = list(error.problems), [], []
    else:
        found: list[str] = []
        try:
            has_keys = asyncio.run(has_stored_keys(settings))
        except ConfigError as error:
            has_keys = True  # perhaps: the problem to solve first is that of the store
            found.append(f"store: {error}")
        found += [*find_problems(settings, has_stored_keys=has_keys), *find_backend_problems(settings)]
        problems = [hide_secrets(problem, settings) for problem in dict.fromkeys(found)]
        warnings = find_warnings(settings, has_stored_keys=has_keys)
        summary = list(_summarize(settings, str(find_file(arguments.config) or "none"), has_stored_keys=has_keys))
    for warning in warnings:
        print(f"warning: {warning}")
    for problem in problems:
        print(f"problem: {' '.join(problem.split())}")
    if problems:
        return 1
    print("ok", *summary, sep="\n  ")
    return 0


def find_problems(settings: Settings, *, has_stored_keys: bool) -> list[str]:
    """Return the problems, apart from those of backends, with which a server would not start.

    Nothing is opened, created or requested. The modules of `agent_tools` are imported, as a server does.
    """
    found = ProblemCollector()
    with found.collect():
        check_exposure(settings, has_stored_keys=has_stored_keys)
    store = None
    with found.collect_at("store"):
        limits = StoreLimits(listen_url=settings.store_listen_url)
        store = locate_store("memory:" if settings.stateless else settings.store, limits=limits)
    with found.collect():
        if store is not None:
            make_containers(settings, store)
    for model, targets in settings.models.items():
        for target in targets:
            with found.collect():
                parse_target(model, target, settings.backends)
    with found.collect():
        if settings.seal_keys:
            read_secrets(settings.seal_keys, origin="seal_keys")
    with found.collect():
        OutboundRules.parse(settings.outbound_allow)
    with found.collect():
        if not settings.stateless:
            create_hosted_tools(HostedSetup(settings=settings))
    with found.collect():
        if settings.agent_tools:
            load_agent_tools(settings)
    return found.problems


def find_backend_problems(settings: Settings) -> list[str]:
    """Return the problems of the options of backends. A model is not loaded, but its weights must exist."""
    found = ProblemCollector()
    for name, backend in settings.backends.items():
        with found.collect_at(f"backends.{name}"):
            create(backend.kind, name=name, options=backend.options, data_dir=settings.data_dir)
    return found.problems


def find_warnings(settings: Settings, *, has_stored_keys: bool) -> list[str]:
    """Return the warnings that a server with these settings would log, and those about doubtful limits."""
    found = ProblemCollector()
    exposure = None
    with found.collect():
        exposure = check_exposure(settings, has_stored_keys=has_stored_keys)
    unpriced = lacks_default_price(settings.limits, settings.projects, settings.prices)
    warnings = [*settings.warnings, *describe_doubtful_limits(settings)]
    return [*warnings, *([exposure] if exposure else []), *([_UNPRICED] if unpriced else [])]


def _summarize(settings: Settings, file: str, *, has_stored_keys: bool) -> Iterator[str]:
    projects = sorted({key.project for key in settings.api_keys})
    keys = "in the store" if has_stored_keys else str(len(settings.api_keys))
    yield f"file      {file}"
    yield f"address   {settings.host}, port {settings.port}"
    yield f"store     {'none: stateless' if settings.stateless else hide_password(settings.store)}"
    yield f"keys      {keys}" + (f", of the projects {', '.join(projects)}" if projects else "")
    yield f"backends  {', '.join(f'{name} ({backend.kind})' for name, backend in settings.backends.items())}"
    if settings.models:
        yield f"models    {', '.join(settings.models)}"
