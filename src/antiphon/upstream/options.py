"""What can be set for every backend that asks another server."""

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from antiphon.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Retries = Annotated[int, Meta(ge=0, le=100)]


class UpstreamOptions(Struct, kw_only=True):
    """A kind of upstream adds its own by subclassing.

    `base_url` includes the API's version, as in http://127.0.0.1:8000/v1. `headers` and `query` are added to every
    request. With `models` exactly those are served, and the upstream is not asked for its list. `context_window`
    counts for all of its models, whatever it says of them itself.

    `first_token_timeout` runs from the request until the model has said something: signs of life do not count.
    `idle_timeout` is the longest silence after that. `request_retries` are for requests that got no answer,
    `stream_retries` for answers that broke off before they said anything; once something was said, nothing is repeated.
    """

    base_url: str
    api_key: str | None = None
    headers: dict[str, str] = {}
    query: dict[str, str] = {}
    models: list[Annotated[str, Meta(min_length=1)]] | None = None
    context_window: Annotated[int, Meta(ge=1)] | None = None
    connect_timeout: Seconds = 10.0
    first_token_timeout: Seconds = 300.0
    idle_timeout: Seconds = 300.0
    request_retries: Retries = 4
    stream_retries: Retries = 5
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    verify_tls: bool = True

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/")

    def __repr__(self) -> str:
        """Everything but the secrets: headers and queries may carry keys too, so only their names are shown."""
        hidden = {
            "api_key": "None" if self.api_key is None else "'***'",
            "headers": f"<{', '.join(self.headers)}>",
            "query": f"<{', '.join(self.query)}>",
        }
        shown = (f"{name}={hidden.get(name) or repr(getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"


def check_options(options: UpstreamOptions, *, name: str) -> None:
    """Refuse what no request could be sent with. `name` is what the configuration calls the backend."""
    where = f"backends.{name}"
    _check_url(options.base_url, where=f"{where}.base_url")
    if options.api_key is not None and not is_header_value(options.api_key):
        raise ConfigError(f"{where}.api_key: a key is a line of ASCII text, not empty, without spaces around it")
    for header, text in options.headers.items():
        if not header.isascii() or not header.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{where}.headers: {header!r} is not the name of a header")
        if text and not is_header_value(text):
            raise ConfigError(f"{where}.headers.{header}: a header is a line of ASCII text, without spaces around it")


def _check_url(url: str, *, where: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        parts, good = urlsplit(""), False
    if not good or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: not the address of a server; write it as http://HOST:PORT/v1")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{where}: no user or password goes into the address; use api_key or headers")
    if parts.query or parts.fragment:
        raise ConfigError(f"{where}: nothing may follow the path; use query")


def is_header_value(text: str) -> bool:
    """Whether a text can be the value of a header."""
    return bool(text) and text.isascii() and text.isprintable() and text == text.strip()
