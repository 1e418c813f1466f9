"""Options of backends that call another server."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from antiphon.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Retries = Annotated[int, Meta(ge=0, le=100)]


class UpstreamOptions(Struct, kw_only=True):
    """The options of a backend that calls another server. A backend kind adds its own in a subclass."""

    base_url: str
    """The address with the API version, as in http://127.0.0.1:8000/v1."""
    api_key: str | None = None
    headers: dict[str, str] = {}
    """Headers of every request."""
    query: dict[str, str] = {}
    """Query parameters of every request."""
    models: list[Annotated[str, Meta(min_length=1)]] | None = None
    """Serve only these models, and do not request the upstream's list."""
    context_window: Annotated[int, Meta(ge=1)] | None = None
    """Overrides the upstream's value for all models."""
    connect_timeout: Seconds = 10.0
    first_token_timeout: Seconds = 300.0
    """Time from the request to the first delta."""
    idle_timeout: Seconds = 300.0
    """Longest time without a delta after the first one. Keepalives do not count."""
    answer_timeout: Seconds | None = None
    """Time for an answer that is not streamed. The default is twice `first_token_timeout`."""
    always_stream: bool = False
    """Stream all turns, not only those that a client reads as a stream."""
    request_retries: Retries = 4
    """Number of retries of a request without a response."""
    stream_retries: Retries = 5
    """Number of retries of a response that breaks off before the first delta. Later nothing is retried."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    verify_tls: bool = True
    trust_env: bool = False
    """Use the proxies in `HTTP_PROXY` and `HTTPS_PROXY`, except for hosts in `NO_PROXY`."""

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/")

    def __repr__(self) -> str:
        """Show all options, but not the values of `api_key`, `headers` and `query`, which may contain keys."""
        hidden = {
            "api_key": "None" if self.api_key is None else "'***'",
            "headers": f"<{', '.join(self.headers)}>",
            "query": f"<{', '.join(self.query)}>",
        }
        shown = (f"{name}={hidden.get(name) or repr(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"


def check_options(options: UpstreamOptions, *, name: str) -> None:
    """Raise `ConfigError` for options with which no request can be sent. `name` is the backend's configured name."""
    where = f"backends.{name}"
    _check_url(options.base_url, where=f"{where}.base_url")
    if options.api_key is not None and not is_header_value(options.api_key):
        raise ConfigError(f"{where}.api_key: must be one line of ASCII text, not empty, without surrounding spaces")
    for header, text in options.headers.items():
        if not header.isascii() or not header.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{where}.headers: {header!r} is not a valid header name")
        if text and not is_header_value(text):
            raise ConfigError(f"{where}.headers.{header}: must be one line of ASCII text, without surrounding spaces")


def _check_url(url: str, *, where: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # malformed brackets or port
        parts, good = urlsplit(""), False
    if not good or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: not the address of a server; write it as http://HOST:PORT/v1")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{where}: user and password are not allowed in the URL; use api_key or headers")
    if parts.query or parts.fragment:
        raise ConfigError(f"{where}: query and fragment are not allowed in the URL; use query")


def is_header_value(text: str) -> bool:
    """Return True if the text can be the value of a header."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()
