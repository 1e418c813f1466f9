"""From settings to an engine: the one place where backends and the store are put together."""

import hashlib

import msgspec

from antiphon.backends.registry import create
from antiphon.config import DbosSettings, Settings
from antiphon.engine.engine import Engine
from antiphon.engine.policy import Policy
from antiphon.engine.sealing import Sealer, load_secrets, read_secrets
from antiphon.errors import ConfigError
from antiphon.store.location import locate_store

SEAL_FILE = "seal.keys"
_DAY = 24 * 60 * 60


def build_engine(settings: Settings) -> Engine:
    """An engine, not yet started. Raises ConfigError for what cannot be made."""
    backends = {
        name: create(backend.kind, name=name, options=backend.options, data_dir=settings.data_dir)
        for name, backend in settings.backends.items()
    }
    sealer = make_sealer(settings)
    # A stateless server must not show what another one has left in the store.
    store = locate_store("memory:" if settings.stateless else settings.store, home=make_home(settings, sealer))
    return Engine(backends=backends, store=store, policy=make_policy(settings), sealer=sealer)


def place_dbos(settings: Settings) -> DbosSettings | None:
    """Where DBOS keeps what it knows, unless the settings say so: beside the store."""
    dbos = settings.dbos
    if dbos is None or settings.stateless:  # which runs nothing in the background
        return None
    if not settings.store.startswith("sqlite:"):
        if dbos != DbosSettings():
            raise ConfigError("dbos: its limits are for a store that outlives the process.")
        return None  # what is gone with the process needs nobody to go on with it
    return dbos if dbos.database else msgspec.structs.replace(dbos, database=f"{settings.store}-dbos")


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
    return Sealer(load_secrets(path), look_again=lambda: load_secrets(path))


def make_policy(settings: Settings) -> Policy:
    return Policy(
        inherit_tools=settings.inherit_tools,
        # However short, a retention is none that keeps for ever.
        retention_seconds=max(1, round(settings.retention_days * _DAY)) if settings.retention_days else None,
        background_slots=settings.background_slots,
        background_lease_seconds=settings.background_lease_seconds,
        dbos=place_dbos(settings),
        opening_seconds=settings.opening_seconds,
        models=settings.models,
        unsupported_tools=settings.unsupported_tools,
        stateless=settings.stateless,
        id_prefix=settings.stateless_id_prefix if settings.stateless else "",
    )
