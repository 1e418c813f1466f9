"""Another server's errors as ours: its words are kept, what it is and where it is are not told.

A client can do nothing about our key for the upstream, its address or its faults, so those are errors of this server's
(502 and the like). What the client can mend (the request, the model's name, the length) keeps its status.
"""

import re
from collections.abc import Collection
from typing import Any

from antiphon.backends.upstream.redaction import redact
from antiphon.backends.upstream.report import Report, read_body, read_payload
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

AUTHENTICATION = "upstream_authentication"
REFUSED = "upstream_refused"
OVERLOADED = "upstream_overloaded"

SPENT_CODES = frozenset(
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


def explain(
    status: int, body: bytes, *, secrets: Collection[str] = (), retry_after: float | None = None
) -> AntiphonError:
    """The error that an answer with this status and body is. `retry_after` is what its headers say, in seconds."""
    retry_after = None if retry_after is None else min(retry_after, _LONGEST_WAIT)
    return _classify(status, read_body(body), secrets=secrets, retry_after=retry_after)


def explain_event(payload: Any, *, secrets: Collection[str] = ()) -> AntiphonError:
    """The error that stands in an event, or in the body, of an answer whose status was good."""
    report = read_payload(payload)
    status = report.status or _STATUSES.get(report.code) or _STATUSES.get(report.type) or 500
    return _classify(status, report, secrets=secrets, retry_after=None)


def break_off() -> UpstreamError:
    """The error of an answer that ended before it was complete."""
    return UpstreamError("The connection to the upstream was closed before the answer ended.")


def _classify(status: int, report: Report, *, secrets: Collection[str], retry_after: float | None) -> AntiphonError:
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
        wait = retry_after if retry_after is not None else find_wait(report.message)
        spent = "insufficient_quota" if status == 402 else code
        return RateLimited(message or "The upstream takes no more requests for now.", code=spent, retry_after=wait)
    return _blame_upstream(status, message, retry_after=retry_after)


def _find_meaning(status: int, report: Report, message: str, param: str | None) -> AntiphonError | None:
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


def find_wait(message: str) -> float | None:
    """How many seconds to wait, if the words say it, as in `Please try again in 1m2.5s.`"""
    found = _WAIT.search(message)
    if found is None:
        return None
    wait = sum(float(number) * _SECONDS[unit.lower()] for number, unit in _DURATION.findall(found[1]))
    return min(wait, _LONGEST_WAIT)
