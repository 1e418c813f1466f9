"""From settings to an engine: the one place where backends and the store are put together."""

import hashlib
import logging

from antiphon.backends.registry import create
from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.sealing import Sealer, load_secrets, read_secrets
from antiphon.store.limits import RunLimits
from antiphon.store.location import locate_store

logger = logging.getLogger(__name__)

SEAL_FILE = "seal.keys"
_DAY = 24 * 60 * 60


def build_engine(settings: Settings) -> Engine:
    """Return an engine, not yet started. Log the warnings of the settings.

    Raises ConfigError for an unknown backend or store.
    """
    for warning in settings.warnings:
        logger.warning("%s", warning)
    backends = {
        name: create(backend.kind, name=name, options=backend.options, data_dir=settings.data_dir)
        for name, backend in settings.backends.items()
    }
    sealer = make_sealer(settings)
    # A stateless server must not show what another one has left in the store.
    store = locate_store("memory:" if settings.stateless else settings.store, home=make_home(settings, sealer))
    return Engine(backends=backends, store=store, policy=make_policy(settings), sealer=sealer)


def make_home(settings: Settings, sealer: Sealer) -> str:
    """The same for every process that serves the same models, such as this server when it is started again.

    The store keeps it, and options hold secrets: it is sealed, so that nobody there can check a guess at them.
    """
    backends = [(name, backend.kind, backend.options) for name, backend in settings.backends.items()]
    serving = repr((str(settings.data_dir), backends, settings.models))
    return sealer.seal(hashlib.sha256(serving.encode()).digest(), project="", purpose="home")


def make_sealer(settings: Settings) -> Sealer:
    """Without keys in the settings, there is a file of them in the data folder."""
    if settings.seal_keys:
        return Sealer(read_secrets(settings.seal_keys, origin="seal_keys"))
    path = settings.data_dir / SEAL_FILE
    return Sealer(load_secrets(path), reload_secrets=lambda: load_secrets(path))


def make_policy(settings: Settings) -> Policy:
    return Policy(
        inherit_tools=settings.inherit_tools,
        # However short, a retention is none that keeps for ever.
        retention_seconds=max(1, round(settings.retention_days * _DAY)) if settings.retention_days else None,
        background_slots=settings.background_slots,
        background_lease_seconds=settings.background_lease_seconds,
        background_limits=RunLimits(
            concurrency=settings.background_concurrency,
            concurrency_per_project=settings.background_concurrency_per_project,
            starts_per_minute=settings.background_starts_per_minute,
        ),
        first_delta_seconds=settings.opening_seconds,
        models=settings.models,
        unsupported_tools=settings.unsupported_tools,
        stateless=settings.stateless,
        id_prefix=settings.stateless_id_prefix if settings.stateless else "",
    )
