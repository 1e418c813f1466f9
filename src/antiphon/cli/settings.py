"""The settings of a command: what config.py reads, with the command line's options on top."""

from argparse import Namespace
from typing import Any

from antiphon.config import Settings, environment, load
from antiphon.errors import ConfigError


def load_settings(arguments: Namespace, **overrides: Any) -> Settings:
    """Overrides that are None were not given."""
    # A variable that an option points to is no setting, whatever it is called.
    named = {value for name, value in vars(arguments).items() if name.endswith("_env")}
    variables = {name: value for name, value in environment().items() if name not in named}
    return load(arguments.config, variables, overrides)


def read_secret(variable: str, *, option: str) -> str:
    """The value of the variable that an option names: secrets never stand on a command line."""
    value = environment().get(variable)
    if not value:
        raise ConfigError(f"{option}: the environment variable {variable} is not set.")
    return value


def server_url(settings: Settings) -> str:
    """The address of the server with these settings, seen from this machine."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return reachable_url(f"http://{host}:{settings.port}")


def reachable_url(url: str) -> str:
    """A server that listens on all addresses is reached at the machine's own."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:", 1).replace("//[::]:", "//[::1]:", 1)
