"""From settings to an engine: the one place where backends and the store are put together."""

from antiphon.backends.registry import create
from antiphon.config import Settings
from antiphon.engine.engine import Engine
from antiphon.store.location import locate_store


def build_engine(settings: Settings) -> Engine:
    """An engine, not yet started. Raises ConfigError for what cannot be made."""
    backends = {
        name: create(backend.kind, name=name, options=backend.options, data_dir=settings.data_dir)
        for name, backend in settings.backends.items()
    }
    return Engine(backends=backends, store=locate_store(settings.store))
