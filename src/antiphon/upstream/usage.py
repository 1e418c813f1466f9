"""Token usage of an answer: parsed from the formats that servers send, or estimated.

Impossible counts are not passed on. A count that is negative, too large or not a number counts as missing, which is 0.
A total below the sum of input and output is replaced by the sum. A larger one is passed on, because some servers count
tokens of reasoning in the total alone. A detail is never larger than the count that it is a part of.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.upstream.token_estimate import estimate_item, estimate_payload_tokens, estimate_tokens

MAX_COUNT = 10**12
"""A larger number of tokens is an error of the server."""

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None

logger = logging.getLogger(__name__)

_warned: set[str] = set()


class _Details(Struct):
    cached_tokens: _Count = None
    cache_write_tokens: _Count = None
    cache_creation_tokens: _Count = None
    reasoning_tokens: _Count = None


class _Report(Struct):
    """A usage report with the names of all servers."""

    prompt_tokens: _Count = None
    input_tokens: _Count = None
    completion_tokens: _Count = None
    output_tokens: _Count = None
    total_tokens: _Count = None
    prompt_cache_hit_tokens: _Count = None
    cached_tokens: _Count = None
    reasoning_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    estimated: Any = None


_NO_DETAILS = _Details()

Report = TypeVar("Report", bound=Struct)


def parse_usage(payload: Any) -> Usage | None:
    """Return the usage in an object, or in its field `usage`. Return None if it has no possible counts."""
    if type(payload) is not dict and not isinstance(payload, Mapping):
        return None
    nested = payload.get("usage")  # Groq nests it in `x_groq`
    if nested is not None and isinstance(nested, Mapping):
        payload = nested
    try:
        report = msgspec.convert(payload, _Report)
    except msgspec.ValidationError:
        report = select_counts(payload, _Report)
    input_tokens = report.prompt_tokens if report.prompt_tokens is not None else report.input_tokens
    output_tokens = report.completion_tokens if report.completion_tokens is not None else report.output_tokens
    if input_tokens is None and output_tokens is None:
        return None
    input_tokens, output_tokens = input_tokens or 0, output_tokens or 0
    total = input_tokens + output_tokens
    if report.total_tokens is not None:
        if report.total_tokens < total:
            _warn_once("total_tokens", "is less than the sum of input and output; the sum is used")
        else:
            total = report.total_tokens
    input_details = report.prompt_tokens_details or report.input_tokens_details or _NO_DETAILS
    output_details = report.completion_tokens_details or report.output_tokens_details or _NO_DETAILS
    hits = report.prompt_cache_hit_tokens
    cached = input_details.cached_tokens or (hits if hits is not None else report.cached_tokens)
    cache_writes = input_details.cache_write_tokens
    cache_writes = cache_writes if cache_writes is not None else input_details.cache_creation_tokens
    reasoning = output_details.reasoning_tokens or report.reasoning_tokens
    return Usage(
        input_tokens,
        output_tokens,
        total,
        InputTokensDetails(
            min(cached, input_tokens) if cached else 0, min(cache_writes, input_tokens) if cache_writes else 0
        ),
        OutputTokensDetails(min(reasoning, output_tokens) if reasoning else 0),
        estimated=report.estimated is True,
    )


def _warn_once(field: str, fault: str) -> None:
    """Log an impossible count, once for each field: a server may send it with every answer."""
    if field not in _warned:
        _warned.add(field)
        logger.warning("an upstream reports an impossible token usage: '%s' %s.", field, fault)


def select_counts(payload: Mapping[str, Any], kind: type[Report]) -> Report:
    """Return the possible counts of a report with impossible ones. A number with a fraction is rounded down.

    `kind` has a field for each count. Fields whose name ends in `_details` have reports of their own.
    """
    counts: JsonObject = {}
    for field in msgspec.structs.fields(kind):
        name, value = field.name, payload.get(field.name)
        if name == "estimated":
            counts[name] = value
        elif name.endswith("_details"):
            details = next(each for each in get_args(field.type) if each is not type(None))
            counts[name] = select_counts(value, details) if isinstance(value, Mapping) else None
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
            counts[name] = int(value)
        elif value is not None:
            _warn_once(name, "is not a possible count; it is ignored")
    return kind(**counts)


def estimate_usage(
    request: CreateRequest, items: Sequence[Item | Unknown], answer: str, *, input_tokens: int | None = None
) -> Usage:
    """Estimate the usage of a turn from its request, its context and the text of the answer."""
    output_tokens = estimate_tokens(CreateRequest(instructions=answer), []) if answer else 0
    return _make_estimate(estimate_tokens(request, items) if input_tokens is None else input_tokens, output_tokens)


def estimate_output_usage(
    request: CreateRequest,
    items: Sequence[Item | Unknown],
    output: Iterable[JsonObject],
    *,
    input_tokens: int | None = None,
) -> Usage:
    """Estimate the usage of a turn from its request, its context and the output items."""
    input_tokens = estimate_tokens(request, items) if input_tokens is None else input_tokens
    return _make_estimate(input_tokens, _estimate_output(output))


def estimate_payload_usage(request: JsonObject, items: Iterable[JsonObject], output: Iterable[JsonObject]) -> Usage:
    """Estimate the usage of a turn from JSON. `items` is the whole context, even if the server stores a part of it."""
    return _make_estimate(estimate_payload_tokens(request, items), _estimate_output(output))


def _estimate_output(output: Iterable[JsonObject]) -> int:
    return math.ceil(sum(map(estimate_item, output)))


def _make_estimate(input_tokens: int, output_tokens: int) -> Usage:
    return Usage(input_tokens, output_tokens, input_tokens + output_tokens, estimated=True)
