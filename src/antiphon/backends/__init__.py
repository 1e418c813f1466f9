"""The public API for backends: everything that a backend of another package needs.

    Backend, Turn, Capabilities, Model   the interface between the engine and a backend
    deltas, Deltas                       the deltas that `Backend.stream` yields
    extract_text                         the text of a message's content
    read_options                         parse the options of a backend's configuration
    UpstreamBackend, UpstreamOptions,    the base of a backend that calls another server, with retries, timeouts and
    Reader, SseMessage                   the model list
    make_broken_stream_error,            errors that a reader raises
    map_error_payload
    parse_usage, estimate_tokens         token usage as servers report it, or estimated
    *Error and other exceptions          the errors that a backend may raise; `antiphon.errors` explains them

A package registers a backend with an entry point in the group `antiphon.backends`: see docs/guides/new-backend.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.backends.base import Backend, Capabilities, Model, Turn, read_options
    from antiphon.backends.upstream_backend import UpstreamBackend
    from antiphon.errors import (
        ConfigError,
        ContextLengthExceeded,
        InvalidRequest,
        ModelError,
        ModelNotFound,
        RateLimited,
        Unavailable,
        UnsupportedParameter,
        UpstreamError,
        UpstreamTimeout,
    )
    from antiphon.protocol.content import extract_text
    from antiphon.stream import deltas
    from antiphon.stream.deltas import Deltas
    from antiphon.stream.sse import SseMessage
    from antiphon.upstream.delta_stream import Reader
    from antiphon.upstream.error_mapping import make_broken_stream_error, map_error_payload
    from antiphon.upstream.options import UpstreamOptions
    from antiphon.upstream.token_estimate import estimate_tokens
    from antiphon.upstream.usage import parse_usage

__all__ = [
    "Backend",
    "Capabilities",
    "ConfigError",
    "ContextLengthExceeded",
    "Deltas",
    "InvalidRequest",
    "Model",
    "ModelError",
    "ModelNotFound",
    "RateLimited",
    "Reader",
    "SseMessage",
    "Turn",
    "Unavailable",
    "UnsupportedParameter",
    "UpstreamBackend",
    "UpstreamError",
    "UpstreamOptions",
    "UpstreamTimeout",
    "deltas",
    "estimate_tokens",
    "extract_text",
    "make_broken_stream_error",
    "map_error_payload",
    "parse_usage",
    "read_options",
]

# Imported on first use: the base of upstream backends brings an HTTP client, which other backends do not need.
_MODULES = {
    "antiphon.backends.base": ("Backend", "Capabilities", "Model", "Turn", "read_options"),
    "antiphon.backends.upstream_backend": ("UpstreamBackend",),
    "antiphon.errors": (
        "ConfigError",
        "ContextLengthExceeded",
        "InvalidRequest",
        "ModelError",
        "ModelNotFound",
        "RateLimited",
        "Unavailable",
        "UnsupportedParameter",
        "UpstreamError",
        "UpstreamTimeout",
    ),
    "antiphon.protocol.content": ("extract_text",),
    "antiphon.stream.deltas": ("Deltas",),
    "antiphon.stream.sse": ("SseMessage",),
    "antiphon.upstream.delta_stream": ("Reader",),
    "antiphon.upstream.error_mapping": ("make_broken_stream_error", "map_error_payload"),
    "antiphon.upstream.options": ("UpstreamOptions",),
    "antiphon.upstream.token_estimate": ("estimate_tokens",),
    "antiphon.upstream.usage": ("parse_usage",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "deltas":
        return import_module("antiphon.stream.deltas")
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'antiphon.backends' has no attribute {name!r}")
