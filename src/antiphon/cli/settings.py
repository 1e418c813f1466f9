"""The settings of a command: those of config.py, overridden by options of the command line."""

import sys
from argparse import Namespace
from typing import Any

import msgspec

from antiphon.config.loading import environment, load
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError

UPSTREAM_BACKEND = "upstream"
UPSTREAM_KINDS = {"chat": "chat_completions", "responses": "responses", "anthropic": "anthropic_messages"}


def load_settings(arguments: Namespace, **overrides: Any) -> Settings:
    """Load the settings and print their warnings. Overrides that are None were not given."""
    settings = read_settings(arguments, **overrides)
    for warning in settings.warnings:
        print(f"antiphon: warning: {warning}", file=sys.stderr)
    return msgspec.structs.replace(settings, warnings=())


def read_settings(arguments: Namespace, **overrides: Any) -> Settings:
    """Load the settings, for a command that prints or logs their warnings itself."""
    # A variable that an option names is not a setting, even if its name starts with ANTIPHON_.
    named = {value for name, value in vars(arguments).items() if name.endswith("_env")}
    variables = {name: value for name, value in environment().items() if name not in named}
    return load(arguments.config, variables, overrides)


def read_secret(variable: str, *, option: str) -> str:
    """Return the value of the environment variable that an option names."""
    value = environment().get(variable)
    if not value:
        raise ConfigError(f"{option}: the environment variable {variable} is not set.")
    return value


def read_key(arguments: Namespace) -> str | None:
    """Return the API key for the server that `--key-env` names, if it was given."""
    return read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None


def server_url(settings: Settings) -> str:
    """Return the URL of the configured server, as seen from this machine."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return reachable_url(f"http://{host}:{settings.port}")


def reachable_url(url: str) -> str:
    """Replace the wildcard address, on which a server listens, by the loopback address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:", 1).replace("//[::]:", "//[::1]:", 1)


def upstream_backend(arguments: Namespace) -> dict[str, dict[str, Any]] | None:
    """Return the backend that `--upstream` defines, if it was given."""
    if not arguments.upstream:
        for option in ("upstream_kind", "upstream_key_env"):
            if getattr(arguments, option):
                raise ConfigError(f"--{option.replace('_', '-')} requires --upstream with the URL of the upstream.")
        return None
    backend = {"kind": UPSTREAM_KINDS[arguments.upstream_kind or "chat"], "base_url": arguments.upstream}
    if arguments.upstream_key_env:
        backend["api_key"] = read_secret(arguments.upstream_key_env, option="--upstream-key-env")
    return {UPSTREAM_BACKEND: backend}
