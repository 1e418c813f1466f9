"""Detection of another server with the same SQLite file. Its workers are one server."""

import logging
import os
from pathlib import Path

from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server.running_servers import RunningServer, ServerFile, list_servers

logger = logging.getLogger(__name__)


def register_store_user(settings: Settings, url: str) -> ServerFile | None:
    """Create the file that shows other servers that this one uses the store. Log a warning if another one does.

    Return None if the store is no SQLite file, which servers can share without restrictions or not at all.
    """
    path = _locate_database(settings)
    if path is None:
        return None
    file = ServerFile.create(_locate_folder(path), url)
    # Listed after the own file exists: of two servers that start at once, at least one finds the other.
    servers = list_servers(_locate_folder(path))
    others = [server for server in servers if not (server.is_local and server.pid == os.getpid())]
    if others:
        logger.warning("%s", _describe_others(path, others))
    return file


def check_unused(path: Path) -> None:
    """Raise ConfigError if a server uses the SQLite file."""
    servers = list_servers(_locate_folder(path))
    if servers:
        raise ConfigError(f"A server uses the store {path}: {_describe(servers)}. Stop it first.")


def _locate_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}-servers")


def _locate_database(settings: Settings) -> Path | None:
    scheme, _, path = settings.store.partition(":///")
    return Path(path) if scheme == "sqlite" and not settings.stateless else None


def _describe_others(path: Path, others: list[RunningServer]) -> str:
    return (
        f"another server uses the SQLite file {path}: {_describe(others)}. Each server answers 404 for foreground "
        "responses of the other that are in progress, and cannot cancel them. Background responses of the other are "
        "followed with a delay. Use one server with --workers, or PostgreSQL."
    )


def _describe(servers: list[RunningServer]) -> str:
    return ", ".join(f"{server.url} (process {server.pid} on {server.host})" for server in servers)
