"""Map the errors of other servers to `AntiphonError`.

There are two points of view. A backend hides its upstream: `map_error_response` and `map_error_payload` keep the
status of errors that the client can fix (the request, the model name, the context length). Errors of our key, the
address or the upstream itself become server errors (502 and similar), without secrets and addresses. An agent is the
client of the server it calls: `map_api_error` keeps the server's own class, code, param and message.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from antiphon.errors import (
    AntiphonError,
    BodyTooLarge,
    ContextLengthExceeded,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    NotFound,
    PreviousResponseNotFound,
    QuotaExceeded,
    RateLimited,
    ServerError,
    Unavailable,
    UnsupportedParameter,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol.json_text import read_json
from antiphon.stream.limits import ANSWER_TOO_LARGE
from antiphon.upstream.redaction import redact

AUTHENTICATION = "upstream_authentication"
REFUSED = "upstream_refused"
OVERLOADED = "upstream_overloaded"

EXHAUSTED_CODES = frozenset(
    {"insufficient_quota", "usage_limit_reached", "usage_not_included", "billing_hard_limit_reached"}
)
"""Codes of limits that a short wait does not lift."""

PERMANENT_CODES = EXHAUSTED_CODES | {AUTHENTICATION, REFUSED, ANSWER_TOO_LARGE}
"""Codes of errors for which a retry is useless."""

MAX_MESSAGE_LENGTH = 2000
# Messages are redacted before they are cut: a part of a secret could not be found.
_MAX_RAW_LENGTH = 3 * MAX_MESSAGE_LENGTH
_MAX_VALUE_LENGTH = 100

# Page patterns need quadratic time on hostile pages.
_MAX_PAGE_LENGTH = 8000

_CODE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_INVISIBLE = re.compile(r"<(script|style|head)\b.*?</\1>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)

# Messages about a context that is too long, from OpenAI, vLLM, llama.cpp, Anthropic, SGLang, Gemini, Ollama, LM Studio,
# Mistral, Groq, xAI, Bedrock and text-generation-inference.
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
# A longer wait is not useful advice, and may not fit into a header.
_MAX_WAIT = 366 * 24 * 3600.0

# HTTP statuses for error types and codes in a stream, where there is no status.
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

_API_ERRORS: dict[str, type[AntiphonError]] = {
    "previous_response_not_found": PreviousResponseNotFound,
    "unsupported_parameter": UnsupportedParameter,
    "context_length_exceeded": ContextLengthExceeded,
    "rate_limit_exceeded": RateLimited,
    "insufficient_quota": QuotaExceeded,
}


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An error as a server reports it. `message` is empty if there is none, and may be longer than is shown."""

    message: str = ""
    type: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None


def map_error_response(
    status: int, body: bytes, *, secrets: Collection[str] = (), retry_after: float | None = None
) -> AntiphonError:
    """Map an HTTP error response. `retry_after` is the wait in seconds from its headers."""
    retry_after = None if retry_after is None else min(retry_after, _MAX_WAIT)
    return _classify(status, parse_error_body(body), secrets=secrets, retry_after=retry_after)


def map_error_payload(payload: Any, *, secrets: Collection[str] = ()) -> AntiphonError:
    """Map an error object in an event, or in the body of a response with a 2xx status."""
    report = parse_error_payload(payload)
    status = report.status or _STATUSES.get(report.code) or _STATUSES.get(report.type) or 500
    return _classify(status, report, secrets=secrets, retry_after=None)


def map_api_error(status: int | None, payload: Any, *, retry_after: float | None = None) -> AntiphonError:
    """Map an error of a Responses API server for its own client. `status` is None for an error in a stream.

    The class follows from the code, else from the type and the status. Code, param and message are the server's; the
    message is put on one line.
    """
    if status is not None and 300 <= status < 400:
        return _make_redirect_error(status)
    report = parse_error_payload(payload)
    code = _get_raw_code(payload) or report.type
    kind = _API_ERRORS.get(code) or _choose_api_error(status, report.type)
    message = (
        cut_message(report.message)
        or code
        or (f"The upstream answered with status {status}." if status else "Unknown error.")
    )
    error = kind(message, param=report.param, retry_after=retry_after)
    error.code = code or error.code
    return error


def _get_raw_code(payload: Any) -> str:
    """Return the code of an error in any form, such as a number."""
    error = payload.get("error") if isinstance(payload, Mapping) else None
    error = error if isinstance(error, Mapping) else payload
    code = error.get("code") if isinstance(error, Mapping) else None
    return str(code) if code else ""


def cut_message(message: str) -> str:
    """Return the message, cut to the maximum length."""
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}…"


def describe_value(value: Any, secrets: Collection[str]) -> str:
    """Return a value of an upstream's answer for an error message: short, on one line, without secrets."""
    return redact(_shorten(str(value)), secrets)[:_MAX_VALUE_LENGTH]


def make_broken_stream_error() -> UpstreamError:
    """Return the error for a stream that ended before the answer was complete."""
    return UpstreamError("The connection to the upstream was closed before the answer ended.")


def parse_error_body(body: bytes) -> ErrorReport:
    """Parse an error body: JSON, HTML or plain text."""
    try:
        payload = read_json(body)
    except msgspec.DecodeError:
        payload = body.decode(errors="ignore")
    return parse_error_payload(payload)


def parse_error_payload(payload: Any) -> ErrorReport:
    """Parse an error from decoded JSON (the whole body or its error object), a page or a text."""
    if isinstance(payload, list) and payload:  # Gemini wraps the object in an array
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return ErrorReport(message=_extract_text(payload) if isinstance(payload, str) else "")
    error = payload.get("error")
    if isinstance(error, Mapping):
        return _parse_error_object(error)
    if isinstance(error, str) and error:
        return _parse_error_object({"message": error, "type": payload.get("error_type"), "code": payload.get("code")})
    if payload.get("detail"):
        return _parse_detail(payload["detail"])
    return _parse_error_object(payload)


def is_error_payload(payload: Any) -> bool:
    """Return True if the JSON of a response with a 2xx status is an error."""
    if isinstance(payload, list) and len(payload) == 1:
        payload = payload[0]
    if not isinstance(payload, Mapping):
        return False
    if payload.get("object") == "error" or payload.get("type") == "error":
        return True
    # A failed response of the Responses API has `error` beside its output.
    return bool(payload.get("error")) and not ({"output", "choices", "content"} & payload.keys())


def decode_json_or_text(data: bytes) -> Any:
    """Decode JSON. Return the text unchanged if it is not JSON."""
    try:
        return read_json(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace")


def parse_wait(message: str) -> float | None:
    """Return the wait in seconds that a message asks for, as in `Please try again in 1m2.5s.`"""
    found = _WAIT.search(message)
    if found is None:
        return None
    wait = sum(float(number) * _SECONDS[unit.lower()] for number, unit in _DURATION.findall(found[1]))
    return min(wait, _MAX_WAIT)


def _classify(
    status: int, report: ErrorReport, *, secrets: Collection[str], retry_after: float | None
) -> AntiphonError:
    message = cut_message(redact(report.message, secrets))
    report = msgspec.structs.replace(report, message=cut_message(report.message))
    param = report.param and redact(report.param, secrets)
    code = redact(report.code, secrets) if report.code else None
    if error := _classify_by_content(status, report, message, param):
        return error
    if status in (400, 422):
        return InvalidRequest(message or "The upstream rejected the request without a reason.", param=param, code=code)
    if status == 413:
        return BodyTooLarge(message or "The request is too large for the upstream.", param=param)
    if status in (402, 429):
        wait = retry_after if retry_after is not None else parse_wait(report.message)
        if status == 402 or QuotaExceeded.type in (report.code, report.type):
            return QuotaExceeded(message or "The quota at the upstream is used up.", retry_after=wait)
        return RateLimited(message or "The upstream's rate limit is exceeded.", code=code, retry_after=wait)
    return _make_server_error(status, message, retry_after=retry_after)


def _classify_by_content(status: int, report: ErrorReport, message: str, param: str | None) -> AntiphonError | None:
    """Return the error if its code or message identifies it better than the status."""
    if report.code == "previous_response_not_found":
        return PreviousResponseNotFound(message, param=param)
    too_long = {report.code, report.type} & _TOO_LONG_CODES or (
        status in (400, 413, 422, 500) and _TOO_LONG.search(report.message)
    )
    if too_long:
        if not param or param.startswith("messages"):  # the field of an upstream's API, not of a client's request
            param = "input"
        return ContextLengthExceeded(message or "The context is too long for the model.", param=param)
    if report.code == "model_not_found" or (status in (400, 404) and _NO_MODEL.search(report.message)):
        return ModelNotFound(message or "The upstream does not have this model.", param="model")
    if status == 404 and report.type == "invalid_request_error" and "URL" not in report.message:
        return NotFound(message, param=param)
    return None


def _make_server_error(status: int, message: str, *, retry_after: float | None) -> UpstreamError | Unavailable:
    reason = f": {message}" if message else f" (status {status})."
    if status in (401, 403):
        text = f"The upstream rejected this server's API key or its permissions{reason}"
        return UpstreamError(text, code=AUTHENTICATION)
    if status == 404:
        return UpstreamError(f"The upstream does not serve this path: check the base_url{reason}", code=REFUSED)
    if status in (408, 504, 524):
        return UpstreamTimeout(f"The upstream did not answer in time{reason}", retry_after=retry_after)
    if status in (503, 529):
        return Unavailable(f"The upstream is overloaded{reason}", code=OVERLOADED, retry_after=retry_after)
    if status < 400:
        return _make_redirect_error(status)
    if status < 500 and status not in (409, 425):
        return UpstreamError(f"The upstream rejected the request{reason}", code=REFUSED)
    return UpstreamError(f"The upstream failed{reason}", retry_after=retry_after)


def _make_redirect_error(status: int) -> UpstreamError:
    text = f"The upstream answered with a redirect (status {status}): check the base_url."
    return UpstreamError(text, code=REFUSED)


def _choose_api_error(status: int | None, kind: str) -> type[AntiphonError]:
    if status == 429 or kind == "rate_limit_error":
        return RateLimited
    if kind == "model_error":
        return ModelError
    if (status is not None and 400 <= status < 500) or kind == "invalid_request_error":
        return InvalidRequest
    return ServerError if status is None else UpstreamError


def _parse_error_object(error: Mapping[str, Any]) -> ErrorReport:
    code = error.get("code")
    status = code if isinstance(code, int) else error.get("status_code")
    param = error.get("param")
    return ErrorReport(
        message=_shorten(_find_message(error)),
        type=_parse_code(error.get("type")) or _parse_code(error.get("status")).lower(),
        code=_parse_code(code),
        param=_shorten(param)[:200] if isinstance(param, str) and param else None,
        status=status if isinstance(status, int) and 400 <= status < 600 else None,
    )


def _find_message(error: Mapping[str, Any]) -> str:
    metadata = error.get("metadata")
    # OpenRouter: the message is "Provider returned error", and the provider's own error is in `metadata.raw`.
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if isinstance(raw, str) and raw:
        return parse_error_body(raw.encode(errors="replace")).message or raw
    for name in ("message", "msg", "detail", "error_description"):
        text = error.get(name)
        if isinstance(text, str) and text:
            return text
        if isinstance(text, list | Mapping) and text:
            return _parse_detail(text).message
    return ""


def _parse_detail(detail: Any) -> ErrorReport:
    """Parse FastAPI's `detail`: a text, an object, or a list of validation errors."""
    if isinstance(detail, Mapping):
        return parse_error_payload(detail)
    if not isinstance(detail, list):
        return ErrorReport(message=_shorten(str(detail)))
    errors = [error for error in detail if isinstance(error, Mapping)]
    texts = [f"{_join_path(error.get('loc'))}: {error.get('msg', 'invalid')}" for error in errors]
    param = _join_path(errors[0].get("loc")) if errors and "loc" in errors[0] else None
    return ErrorReport(message=_shorten("; ".join(texts)), param=param)


def _join_path(loc: Any) -> str:
    return ".".join(str(step) for step in loc if step != "body") if isinstance(loc, list) else str(loc or "body")


def _extract_text(text: str) -> str:
    """Return the title of a page, else its visible text."""
    text = text[:_MAX_PAGE_LENGTH]
    if "<" in text and (title := _TITLE.search(text)) and title[1].strip():
        text = title[1]
    elif "<html" in text.lower():
        text = _INVISIBLE.sub(" ", text)
    if "&" in text:
        import html  # its table of entities is large, and few errors are pages

        text = html.unescape(text)
    return _shorten(text)


def _shorten(text: str) -> str:
    """Return the text on one line, without control characters, cut to the maximum raw length."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * MAX_MESSAGE_LENGTH]).split())
    return words[:_MAX_RAW_LENGTH]


def _parse_code(value: Any) -> str:
    """Return a code or type, or an empty string for a sentence or a number."""
    return value if isinstance(value, str) and _CODE.fullmatch(value) and not value.isdigit() else ""
