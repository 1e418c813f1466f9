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


NAME = "upstream"

KINDS = {"chat": "chat_completions", "responses": "responses", "anthropic": "anthropic_messages"}


def choose_upstream(arguments: Namespace) -> dict[str, dict[str, Any]] | None:
    """The backend for --upstream, if it was given."""
    if not arguments.upstream:
        for option in ("upstream_kind", "upstream_key_env"):
            if getattr(arguments, option):
                raise ConfigError(f"--{option.replace('_', '-')}: give the upstream's address too, with --upstream.")
        return None
    backend = {"kind": KINDS[arguments.upstream_kind or "chat"], "base_url": arguments.upstream}
    if arguments.upstream_key_env:
        backend["api_key"] = read_secret(arguments.upstream_key_env, option="--upstream-key-env")
    return {NAME: backend}
