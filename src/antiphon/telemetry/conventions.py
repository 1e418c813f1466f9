"""Attributes of spans after the semantic conventions of OpenTelemetry for generative AI, for agents and servers.

The conventions are not stable yet. This module imports OpenTelemetry: import it only if traces or metrics are on.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from antiphon.entry_points import find_own_version
from antiphon.errors import AntiphonError
from antiphon.protocol.response import Usage
from antiphon.telemetry.current_trace import CurrentTrace
from antiphon.telemetry.trace_context import encode_trace_headers, read_trace_ids

SCOPE = "antiphon"

MAX_CONTENT_BYTES = 256 * 1024
"""Maximum size of an attribute with the text of prompts, answers, arguments or results."""

# The parameters of a request that have an attribute.
REQUEST_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


def describe_usage(usage: Usage) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.input_tokens_details.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.output_tokens_details.reasoning_tokens,
    }


def describe_address(url: str) -> dict[str, str | int]:
    """Return the host and the port of a URL. User names, passwords, paths and queries are left out."""
    try:
        address = urlsplit(url)
        host, port = address.hostname, address.port
    except ValueError:  # such as a port that is not a number
        return {}
    if not host:
        return {}
    return {"server.address": host, "server.port": port or (443 if address.scheme == "https" else 80)}


def find_error_type(error: BaseException) -> str:
    """Return the value of `error.type` for an exception."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if isinstance(error, AntiphonError):
        return error.code or error.type
    return type(error).__name__


def record_error(span: Span, error: BaseException) -> None:
    """Record the exception that ended a span. A cancellation, or the loss of the run, is not a failure of it."""
    span.set_attribute("error.type", find_error_type(error))
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return
    span.set_status(StatusCode.ERROR, error.message if isinstance(error, AntiphonError) else str(error))


def encode_attribute(value: object) -> str:
    """Return a value as JSON, or a note about its size if it is too large.

    Thousands of spans can wait for their export, so the memory of each must be bounded.
    """
    encoded = msgspec.json.encode(value)
    return encoded.decode() if len(encoded) <= MAX_CONTENT_BYTES else note_omission(len(encoded))


def limit_content(text: str) -> str:
    """Return a text, or a note about its size if it is too large."""
    return text if len(text) <= MAX_CONTENT_BYTES else note_omission(len(text))


def note_omission(size: int) -> str:
    return f'"omitted: {size} bytes"'


def turn_on_current_trace() -> None:
    """Let upstreams continue the current trace, and log lines name it."""
    CurrentTrace.encode_headers, CurrentTrace.read_ids = encode_trace_headers, read_trace_ids


def make_tracer(provider: trace.TracerProvider) -> Any:
    return provider.get_tracer(SCOPE, find_own_version())
