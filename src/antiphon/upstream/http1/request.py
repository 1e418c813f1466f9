"""The head of a request, and the server that a URL names."""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from antiphon.upstream.http1.errors import InvalidHeader, InvalidUrl

DEFAULT_PORTS = {"http": 80, "https": 443}

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PATH_SAFE = "/%:@!$&'()*+,;=~"
_QUERY_SAFE = _PATH_SAFE + "?"
# The client itself writes the headers on which the framing of a request depends.
_FRAMING = frozenset({"content-length", "transfer-encoding"})


@dataclass(frozen=True)
class Origin:
    """A server. `authorization` is for user and password in its URL."""

    scheme: str
    host: str
    port: int
    authorization: str | None = None

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """Host and port, as CONNECT needs them."""
        return f"{self._bracketed}:{self.port}"

    @property
    def host_header(self) -> str:
        return self._bracketed if self.port == DEFAULT_PORTS[self.scheme] else self.authority

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_origin(url: str) -> Origin:
    """Return the server of a URL. Raises InvalidUrl."""
    parts = _split(url)
    try:
        host, port = parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode("ascii")
    except ValueError:  # UnicodeError is a subclass
        raise InvalidUrl(url) from None
    if parts.scheme not in DEFAULT_PORTS or not host or port == 0 or quote(host, safe=":%!$&'()*+,;=~") != host:
        raise InvalidUrl(url)
    authorization = None
    if parts.username is not None:
        authorization = encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))
    return Origin(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], authorization)


def encode_basic_auth(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode("ascii")


def parse_target(url: str, query: Mapping[str, str] | None = None) -> str:
    """Return path and query of a URL, quoted. `query` replaces parameters of the URL with the same names."""
    parts = _split(url)
    text = quote(_LONE_PERCENT.sub("%25", parts.query), safe=_QUERY_SAFE)
    if query:
        pairs = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in query]
        text = urlencode([*pairs, *query.items()])
    path = quote(_LONE_PERCENT.sub("%25", parts.path), safe=_PATH_SAFE) or "/"
    return f"{path}?{text}" if text else path


def encode_head(method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode the request line and the headers, without the empty line at the end. Raises InvalidHeader."""
    if not _TOKEN.fullmatch(method):
        raise InvalidHeader("method")
    lines = [f"{method} {target} HTTP/1.1"]
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value) or name.lower() in _FRAMING:
            raise InvalidHeader(name)
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, ""]).encode()


def merge_headers(*parts: Mapping[str, str]) -> dict[str, str]:
    """Return all headers. Of those with the same name, in upper or lower case, the last one counts."""
    merged: dict[str, tuple[str, str]] = {}
    for headers in parts:
        for name, value in headers.items():
            merged[name.lower()] = (name, value)
    return dict(merged.values())


def _split(url: str) -> SplitResult:
    # `urlsplit` silently removes line breaks and tabs.
    if _CONTROL.search(url) or "\t" in url:
        raise InvalidUrl(url)
    try:
        return urlsplit(url)
    except ValueError:
        raise InvalidUrl(url) from None
