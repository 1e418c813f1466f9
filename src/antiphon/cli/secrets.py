"""Mask the secrets of the settings in the output of commands."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from antiphon.config.settings import Settings
from antiphon.upstream.redaction import mask_secrets

# Names of settings and of options of backends. All texts in a table with such a name are secrets too.
_SECRET = re.compile(r"(\w+[_-])?(key|keys|token|secret|password|authorization)|headers|query|env", re.IGNORECASE)


def hide_secrets(text: str, settings: Settings) -> str:
    """Return a text without the secrets that the settings contain."""
    return mask_secrets(text, frozenset(_find_secrets(msgspec.to_builtins(settings, enc_hook=str))))


def _find_secrets(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            # The entries of `api_keys` have a key and the name of a project.
            matches = name != "api_keys" and _SECRET.fullmatch(name) is not None
            yield from _find_secrets(inner, is_secret=is_secret or matches)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _find_secrets(inner, is_secret=is_secret)
    elif isinstance(value, str) and is_secret:
        yield value
    elif isinstance(value, str) and "://" in value:
        yield from _find_url_secrets(value)


def _find_url_secrets(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    if parts.password:
        yield from (parts.password, unquote(parts.password))
    if parts.query:
        yield parts.query
