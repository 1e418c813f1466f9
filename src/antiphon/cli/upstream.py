"""The options that put another server behind this one, as the backend that they make."""

from argparse import Namespace
from typing import Any

from antiphon.cli.settings import read_secret
from antiphon.errors import ConfigError

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
