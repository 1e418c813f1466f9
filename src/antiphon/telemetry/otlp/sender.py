"""Sends encoded spans to the collector that the OTEL_EXPORTER_OTLP_* variables name, over HTTP."""

import gzip
import itertools
import logging
import math
import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import unquote

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, ProxyError, SSLError, TimeoutError

from antiphon.telemetry.environment import read_otlp_variable, read_variable
from antiphon.telemetry.log_limit import LogLimit

logger = logging.getLogger(__name__)

_DEFAULT_ENDPOINT = "http://localhost:4318"
_DEFAULT_SECONDS = 10.0
# The shortest time limit of an attempt.
_MIN_SECONDS = 0.1
_RETRIED = frozenset({429, 502, 503, 504})
_TEMPORARY = (NewConnectionError, ProtocolError, ProxyError, SSLError, TimeoutError)
# The answer of a collector is a few bytes.
_MAX_ANSWER_BYTES = 1 << 16
_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda payload: gzip.compress(payload, 6),
    "deflate": zlib.compress,
}


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[ !#-+\--:<-\[\]-~]*")


class _Failure(NamedTuple):
    """A failed attempt. `status` is 0 without an answer. `retry_after` are the seconds that the collector asks for."""

    reason: str
    is_temporary: bool
    status: int = 0
    retry_after: float | None = None


class _Target(NamedTuple):
    """The parts of a request that do not change. `pool` connects to the collector, or to a proxy before it."""

    pool: urllib3.HTTPConnectionPool
    url: str
    headers: dict[str, Any]


class OtlpSender:
    """Sends payloads, with retries. `close` ends a wait for the next attempt."""

    def __init__(self, content_type: str, user_agent: str) -> None:
        self._endpoint = _read_endpoint()
        self._seconds = _read_seconds()
        compression = _read_compression()
        self._compress = _COMPRESSIONS.get(compression)
        self._headers = {"content-type": content_type, "user-agent": user_agent}
        if compression:
            self._headers["content-encoding"] = compression
        self._headers |= _read_headers()
        self._certificate: str | bool = read_otlp_variable("CERTIFICATE") or True
        self._client_certificate = _read_client_certificate()
        self._closing = threading.Event()
        self._log_limit = LogLimit()
        self._target: _Target | None = None
        self._session = self._make_session()

    def reset(self) -> None:
        """Forget the connections of the parent process, in a child process."""
        self._closing = threading.Event()
        self._target = None
        self._session = self._make_session()

    def close(self) -> None:
        self._closing.set()
        self._target = None  # else its pool keeps the connection open
        self._session.close()

    def send(self, payload: bytes, seconds: float = math.inf) -> bool:
        """Send a payload within OTEL_EXPORTER_OTLP_TIMEOUT and `seconds`. If that fails, log it and return False."""
        body = payload if self._compress is None else self._compress(payload)
        deadline = time.monotonic() + min(self._seconds, seconds)
        wait = 0.0
        for attempt in itertools.count():
            failure = self._post(body, max(deadline - time.monotonic(), _MIN_SECONDS))
            if failure is None:
                return True
            if failure.retry_after is not None:
                wait = failure.retry_after
            elif attempt or failure.status:
                wait = _make_backoff(attempt)
            # Else the collector has closed the connection of an earlier payload. A new one is made at once.
            if not failure.is_temporary or time.monotonic() + wait > deadline or self._closing.wait(wait):
                self._report(failure.reason)
                break
        return False

    def _post(self, body: bytes, seconds: float) -> _Failure | None:
        """Make one attempt. Return None if the collector has accepted the payload."""
        try:
            pool, url, headers = self._target or self._prepare()
            answer = pool.urlopen(
                "POST",
                url,
                body,
                headers,
                retries=False,
                redirect=False,
                assert_same_host=False,
                timeout=seconds,
                preload_content=False,
                decode_content=False,
            )
        except HTTPError as error:
            return _Failure(_describe(error), isinstance(error, _TEMPORARY))
        except (OSError, ValueError) as error:  # a wrong URL, or a certificate that cannot be read
            is_named = isinstance(error, OSError) and not isinstance(error, requests.RequestException)
            return _Failure(str(error) if is_named else _describe(error), False)
        try:
            answer.read(_MAX_ANSWER_BYTES)
        except HTTPError as error:  # a broken answer
            return _Failure(_describe(error), False)
        finally:
            answer.close()
        if 200 <= answer.status < 300:
            return None
        retry_after = parse_retry_after(answer.headers.get("retry-after", ""))
        return _Failure(f"status {answer.status}", answer.status in _RETRIED, answer.status, retry_after)

    def _prepare(self) -> _Target:
        """Prepare all of a request but its body. Reading proxies and credentials takes longer than sending it.

        A session calls these functions for each request. The rest of its work, such as cookies and redirects, is not
        needed and takes as long again.
        """
        session = self._session
        prepared = session.prepare_request(requests.Request("POST", self._endpoint, headers=self._headers))
        settings = session.merge_environment_settings(self._endpoint, {}, True, self._certificate, None)
        verify, proxies, certificate = settings["verify"], settings["proxies"], settings["cert"]
        adapter = session.get_adapter(self._endpoint)
        assert isinstance(adapter, HTTPAdapter)
        pool = adapter.get_connection_with_tls_context(prepared, verify, proxies=proxies, cert=certificate)
        adapter.cert_verify(pool, self._endpoint, verify, certificate)
        headers = {name: value for name, value in prepared.headers.items() if name.lower() != "content-length"}
        self._target = _Target(pool, adapter.request_url(prepared, proxies), headers)
        return self._target

    def _make_session(self) -> requests.Session:
        session = requests.Session()
        session.cert = self._client_certificate
        return session

    def _report(self, reason: str) -> None:
        if self._log_limit.is_due():
            logger.warning("spans could not be exported to %s: %s", _hide_credentials(self._endpoint), reason)


def parse_retry_after(text: str) -> float | None:
    """Return the seconds of a header `Retry-After`: a number, or a date. None if it is neither."""
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(moment.timestamp() - time.time(), 0.0)


def _make_backoff(attempt: int) -> float:
    return float(2**attempt) * random.uniform(0.8, 1.2)


def _describe(error: BaseException) -> str:
    """Return the kind of the innermost error. Its text can have the URL, and with it a password."""
    while True:
        inner = next(
            (each for each in (getattr(error, "reason", None), *error.args) if isinstance(each, Exception)), None
        )
        if inner is None:
            return type(error).__name__
        error = inner


def _hide_credentials(url: str) -> str:
    """Return the URL without the name, the password and the query, which may have a token. It may be malformed."""
    scheme, mark, rest = url.rpartition("://")
    address, _, query = rest.partition("?")
    return "***" if "@" in query or "@" in scheme else f"{scheme}{mark}{address.rpartition('@')[2]}"


def _read_endpoint() -> str:
    own = read_variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if own:
        return own
    base = read_variable("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINT
    return f"{base.removesuffix('/')}/v1/traces"


def _read_headers() -> dict[str, str]:
    """Return the headers for the collector: name=value, separated by commas. Values without spaces are URL-encoded.

    The function of OpenTelemetry logs a malformed entry, which may be a key.
    """
    headers: dict[str, str] = {}
    for index, entry in enumerate(read_otlp_variable("HEADERS").split(",")):
        name, _, value = map(str.strip, entry.partition("="))
        if _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value):
            headers[name.lower()] = value if " " in value else unquote(value).strip()
        elif entry.strip():
            logger.warning("OTEL_EXPORTER_OTLP_HEADERS: entry %d is not name=value and is not sent", index + 1)
    return headers


def _read_seconds() -> float:
    text = read_otlp_variable("TIMEOUT")
    try:
        seconds = float(text) if text else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if 0 < seconds < math.inf:
        return seconds
    logger.warning("OTEL_EXPORTER_OTLP_TIMEOUT: %r is not a number of seconds; using %g", text, _DEFAULT_SECONDS)
    return _DEFAULT_SECONDS


def _read_compression() -> str:
    """Return the name of the compression, or "" if there is none."""
    name = read_otlp_variable("COMPRESSION").lower()
    if name in _COMPRESSIONS:
        return name
    if name not in ("", "none"):
        logger.warning("OTEL_EXPORTER_OTLP_COMPRESSION: %r is not one of gzip, deflate, none; using none", name)
    return ""


def _read_client_certificate() -> str | tuple[str, str] | None:
    certificate, key = read_otlp_variable("CLIENT_CERTIFICATE"), read_otlp_variable("CLIENT_KEY")
    if not certificate:
        return None
    return (certificate, key) if key else certificate
