"""The settings of a command: what config.py reads, with the command line's options on top."""

from argparse import Namespace
from typing import Any

from antiphon.config import Settings, environment, load
from antiphon.errors import ConfigError


def load_settings(arguments: Namespace, **overrides: Any) -> Settings:
    """Overrides that are None were not given."""
    return load(arguments.config, environment(), overrides)


def read_secret(variable: str, *, option: str) -> str:
    """The value of the variable that an option names: secrets never stand on a command line."""
    value = environment().get(variable)
    if not value:
        raise ConfigError(f"{option}: the environment variable {variable} is not set.")
    return value


def server_url(settings: Settings) -> str:
    """The address at which this machine reaches the server of these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
