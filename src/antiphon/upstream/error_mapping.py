"""Another server's errors as ours: its words are kept, what it is and where it is are not told.

A client can do nothing about our key for the upstream, its address or its faults, so those are errors of this server's
(502 and the like). What the client can mend (the request, the model's name, the length) keeps its status.
"""

import html
import re
import ssl
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec

from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PreviousResponseNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol.json_text import read_json

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)\]}]+", re.IGNORECASE)
_IPV4 = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\.\d)(?::\d{1,5})?"
_IPV6 = r"\[[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*\](?::\d{1,5})?"
_HOST_AND_PORT = r"\b(?:localhost|[a-z0-9_-]+(?:\.[a-z0-9_-]+)+):\d{2,5}\b"
_HOST_OF_A_POOL = r"host='[^']*', port=\d+"  # as urllib3 tells of its connections
_ADDRESS = re.compile(f"{_IPV6}|{_IPV4}|{_HOST_AND_PORT}|{_HOST_OF_A_POOL}", re.IGNORECASE)
# How keys of the usual servers look; some servers repeat a key half masked with stars.
_KEY = re.compile(
    r"\bBearer\s+\S+|\b(?:sk|gsk|xai|hf|nvapi|pk|rk)[-_][\w*.-]{6,}|\bAIza[\w-]{10,}|[\w.-]{0,64}\*{4,}[\w*.-]*",
    re.IGNORECASE,
)

# Shorter ones are no secrets, and would be found within other words.
_SHORTEST_SECRET = 4


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """The text with every secret, key, URL and network address blotted out."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    text = _URL.sub("[URL]", text)
    text = _KEY.sub("***", text)
    return _ADDRESS.sub("[address]", text)


LONGEST_MESSAGE = 2000

# The patterns below take a time that grows with the square of a page that was made for that.
_LONGEST_PAGE = 8000

_CODE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_UNSEEN = re.compile(r"<(script|style|head)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An error in another server's words. `message` is empty if it had none."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None


def parse_error_body(body: bytes) -> ErrorReport:
    """The error in the body of an answer: JSON, HTML or plain text."""
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorReport(message=_read_text(body.decode(errors="ignore")))
    return parse_error_payload(payload)


def decode_json_or_text(data: bytes) -> Any:
    """What stands where an error was told: JSON, else the text as it is."""
    try:
        return read_json(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace")


def parse_error_payload(payload: Any) -> ErrorReport:
    """The error in decoded JSON."""
    if isinstance(payload, list) and payload:  # Gemini wraps the object in an array
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return ErrorReport(message=_shorten(payload) if isinstance(payload, str) else "")
    error = payload.get("error")
    if isinstance(error, Mapping):
        return _read_error(error)
    if isinstance(error, str) and error:
        return _read_error({"message": error, "type": payload.get("error_type"), "code": payload.get("code")})
    if payload.get("detail"):
        return _read_detail(payload["detail"])
    return _read_error(payload)


def is_error_payload(payload: Any) -> bool:
    """Whether a JSON answer with a good status is an error nevertheless."""
    if isinstance(payload, list) and len(payload) == 1:
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return False
    if payload.get("object") == "error" or payload.get("type") == "error":
        return True
    # A failed response of the Responses API has its error beside what it is the error of.
    return bool(payload.get("error")) and not ({"output", "choices", "content"} & payload.keys())


def _read_error(error: Mapping[str, Any]) -> ErrorReport:
    code = error.get("code")
    status = code if isinstance(code, int) else error.get("status_code")
    param = error.get("param")
    return ErrorReport(
        message=_shorten(_find_message(error)),
        type=_take_code(error.get("type")) or _take_code(error.get("status")).lower(),
        code=_take_code(code),
        param=_shorten(param)[:200] if isinstance(param, str) and param else None,
        status=status if isinstance(status, int) and 400 <= status < 600 else None,
    )


def _find_message(error: Mapping[str, Any]) -> str:
    metadata = error.get("metadata")
    # OpenRouter says "Provider returned error", and what the provider said beside it.
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if isinstance(raw, str) and raw:
        return parse_error_body(raw.encode(errors="replace")).message or raw
    for name in ("message", "msg", "detail", "error_description"):
        text = error.get(name)
        if isinstance(text, str) and text:
            return text
        if isinstance(text, list | Mapping) and text:
            return _read_detail(text).message
    return ""


def _read_detail(detail: Any) -> ErrorReport:
    """FastAPI's: a text, an object, or a list of what is wrong where."""
    if isinstance(detail, Mapping):
        return parse_error_payload(detail)
    if not isinstance(detail, list):
        return ErrorReport(message=_shorten(str(detail)))
    faults = [fault for fault in detail if isinstance(fault, Mapping)]
    texts = [f"{_join(fault.get('loc'))}: {fault.get('msg', 'invalid')}" for fault in faults]
    return ErrorReport(
        message=_shorten("; ".join(texts)), param=_join(faults[0].get("loc")) if faults and "loc" in faults[0] else None
    )


def _join(place: Any) -> str:
    return ".".join(str(step) for step in place if step != "body") if isinstance(place, list) else str(place or "body")


def _read_text(text: str) -> str:
    text = text[:_LONGEST_PAGE]
    if "<" in text and (title := _TITLE.search(text)) and title[1].strip():
        text = title[1]
    elif "<html" in text.lower():
        text = _UNSEEN.sub(" ", text)
    return _shorten(html.unescape(text))


def _shorten(text: str) -> str:
    """On one line, without control characters, and of a length that can be shown."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * LONGEST_MESSAGE]).split())
    return words if len(words) <= LONGEST_MESSAGE else f"{words[:LONGEST_MESSAGE]}…"


def _take_code(value: Any) -> str:
    """A code or type as it is, if it is one: not a sentence, and not a number."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) and not value.isdigit() else ""


AUTHENTICATION = "upstream_authentication"
REFUSED = "upstream_refused"
OVERLOADED = "upstream_overloaded"

EXHAUSTED_CODES = frozenset(
    {"insufficient_quota", "usage_limit_reached", "usage_not_included", "billing_hard_limit_reached"}
)
"""Limits that do not pass by waiting a little."""

# What servers say of a context that is too long: OpenAI, vLLM, llama.cpp, Anthropic, SGLang, Gemini, Ollama, LM Studio,
# Mistral, Groq, xAI, Bedrock, text-generation-inference.
_TOO_LONG = re.compile(
    r"maximum context length|maximum model length|max_model_len|context[ _]length[ _]exceeded|exceed_context_size"
    r"|exceeds? (?:the|your|its|this model's|the model's)?\s*(?:available |maximum )?context"
    r"|exceeds? the maximum number of tokens|longer than the (?:model's )?(?:maximum )?context"
    r"|prompt is too long|prompt .{0,40}is too long|input is too long|maximum prompt length|context limit"
    r"|context the overflows|reduce the length of (?:the|your) (?:messages|prompt|input)"
    r"|inputs?`? tokens \+ `?max_new_tokens`? must be",
    re.IGNORECASE,
)
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "string_above_max_length"})
_NO_MODEL = re.compile(
    r"model\b.{0,200}?(?:not (?:be )?found|does(?: not|n't) exist|not exist|is not available|is not supported|unknown)"
    r"|(?:unknown|no such|invalid|not a valid) model|try pulling it|^model: \S+$",
    re.IGNORECASE | re.DOTALL,
)
_WAIT = re.compile(r"(?:try again|retry|wait)\D{0,30}?((?:\d+(?:\.\d+)?\s*(?:h|m|s)[a-z]*\s*)+)", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|millis|h|m|s)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "millis": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# What is longer than a year is no advice, and may be no number that a header could hold.
_LONGEST_WAIT = 366 * 24 * 3600.0

# What the kinds of errors within a stream, where there is no status, would have had for one.
_STATUSES = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "invalid_encrypted_content": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "tokens": 429,
    "requests": 429,
    "insufficient_quota": 429,
    "usage_limit_reached": 429,
    "overloaded_error": 529,
    "server_is_overloaded": 503,
    "slow_down": 503,
    "timeout_error": 504,
}


def map_error_response(
    status: int, body: bytes, *, secrets: Collection[str] = (), retry_after: float | None = None
) -> AntiphonError:
    """The error that an answer with this status and body is. `retry_after` is what its headers say, in seconds."""
    retry_after = None if retry_after is None else min(retry_after, _LONGEST_WAIT)
    return _classify(status, parse_error_body(body), secrets=secrets, retry_after=retry_after)


def map_error_payload(payload: Any, *, secrets: Collection[str] = ()) -> AntiphonError:
    """The error that stands in an event, or in the body, of an answer whose status was good."""
    report = parse_error_payload(payload)
    status = report.status or _STATUSES.get(report.code) or _STATUSES.get(report.type) or 500
    return _classify(status, report, secrets=secrets, retry_after=None)


def make_broken_stream_error() -> UpstreamError:
    """The error of an answer that ended before it was complete."""
    return UpstreamError("The connection to the upstream was closed before the answer ended.")


def _classify(
    status: int, report: ErrorReport, *, secrets: Collection[str], retry_after: float | None
) -> AntiphonError:
    message = redact(report.message, secrets)
    param = report.param and redact(report.param, secrets)
    code = redact(report.code, secrets) if report.code else None
    if error := _find_meaning(status, report, message, param):
        return error
    if status in (400, 422):
        return InvalidRequest(
            message or "The upstream refused the request and did not say why.", param=param, code=code
        )
    if status == 413:
        return BodyTooLarge(message or "The request is too large for the upstream.", param=param)
    if status in (402, 429):
        wait = retry_after if retry_after is not None else parse_wait(report.message)
        spent = "insufficient_quota" if status == 402 else code
        return RateLimited(message or "The upstream takes no more requests for now.", code=spent, retry_after=wait)
    return _blame_upstream(status, message, retry_after=retry_after)


def _find_meaning(status: int, report: ErrorReport, message: str, param: str | None) -> AntiphonError | None:
    """Errors that are known by their words or code, more than by their status."""
    if report.code == "previous_response_not_found":
        return PreviousResponseNotFound(message, param=param)
    too_long = {report.code, report.type} & _TOO_LONG_CODES or (
        status in (400, 413, 422, 500) and _TOO_LONG.search(report.message)
    )
    if too_long:
        return ContextLengthExceeded(message or "The context is too long for the model.", param=param or "input")
    if report.code == "model_not_found" or (status in (400, 404) and _NO_MODEL.search(report.message)):
        return ModelNotFound(message or "The upstream does not have this model.", param="model")
    if status == 404 and report.type == "invalid_request_error" and "URL" not in report.message:
        return NotFound(message, param=param)
    return None


def _blame_upstream(status: int, message: str, *, retry_after: float | None) -> UpstreamError | Unavailable:
    said = f": {message}" if message else f" (status {status})."
    if status in (401, 403):
        text = f"The upstream refused this server's key for it, or what the key is used for{said}"
        return UpstreamError(text, code=AUTHENTICATION)
    if status == 404:
        return UpstreamError(f"The upstream does not serve this path: its base_url may be wrong{said}", code=REFUSED)
    if status in (408, 504, 524):
        return UpstreamTimeout(f"The upstream did not answer in time{said}", retry_after=retry_after)
    if status in (503, 529):
        return Unavailable(f"The upstream is overloaded{said}", code=OVERLOADED, retry_after=retry_after)
    if status < 400:
        text = f"The upstream answered with a redirect (status {status}): its base_url may be wrong."
        return UpstreamError(text, code=REFUSED)
    if status < 500 and status not in (409, 425):
        return UpstreamError(f"The upstream refused the request{said}", code=REFUSED)
    return UpstreamError(f"The upstream failed{said}", retry_after=retry_after)


def parse_wait(message: str) -> float | None:
    """How many seconds to wait, if the words say it, as in `Please try again in 1m2.5s.`"""
    found = _WAIT.search(message)
    if found is None:
        return None
    wait = sum(float(number) * _SECONDS[unit.lower()] for number, unit in _DURATION.findall(found[1]))
    return min(wait, _LONGEST_WAIT)


# RuntimeError is what aiohttp raises for what we closed ourselves.
NETWORK_ERRORS = (aiohttp.ClientError, OSError, RuntimeError)


@contextmanager
def mapped_network_errors() -> Iterator[None]:
    """Raise every error of the network as one of ours."""
    try:
        yield
    except NETWORK_ERRORS as error:
        raise map_network_error(error) from None


def map_network_error(error: Exception) -> UpstreamError:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return UpstreamError(f"The upstream's TLS certificate is not accepted: {_judge(error)}.", code=REFUSED)
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return UpstreamError("The upstream refuses connections.")
    if isinstance(error, _TLS_ERRORS):
        return UpstreamError("No TLS connection to the upstream could be made.", code=REFUSED)
    for kind, make, message in _WORDS:
        if isinstance(error, kind):
            return make(message)
    return make_broken_stream_error() if isinstance(error, aiohttp.ClientPayloadError) else UpstreamError(_BROKEN)


def _judge(error: aiohttp.ClientConnectorCertificateError) -> str:
    """What is wrong with a certificate. A mismatch is told with the name of the host, so not in its own words."""
    reason = getattr(error.certificate_error, "verify_message", "") or "it cannot be verified"
    return "it is for another name" if "mismatch" in reason or "not valid for" in reason else reason


_TLS_ERRORS = (aiohttp.ClientSSLError, ssl.SSLError)
_BROKEN = "The upstream broke the connection off."
# The first that fits: later ones include earlier ones.
_WORDS: tuple[tuple[type[Exception], type[UpstreamError], str], ...] = (
    (aiohttp.ClientConnectorDNSError, UpstreamError, "The upstream's name could not be resolved."),
    (aiohttp.ClientConnectorError, UpstreamError, "The upstream cannot be reached."),
    (aiohttp.ConnectionTimeoutError, UpstreamTimeout, "The upstream could not be connected to in time."),
    (aiohttp.SocketTimeoutError, UpstreamTimeout, "The upstream fell silent before its answer ended."),
    (TimeoutError, UpstreamTimeout, "The upstream did not answer in time."),
    (aiohttp.ClientResponseError, UpstreamError, "The upstream did not answer in proper HTTP."),
)
