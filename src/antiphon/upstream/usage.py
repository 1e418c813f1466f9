"""Token usage of an answer: parsed from the formats that servers send, or estimated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.upstream.token_estimate import estimate_item, estimate_payload_tokens, estimate_tokens

_MAX_COUNT = 2**53
_Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)] | None


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


def parse_usage(payload: Any) -> Usage | None:
    """Return the usage in an object, or in its field `usage`. Return None if it contains no counts."""
    if type(payload) is not dict and not isinstance(payload, Mapping):
        return None
    nested = payload.get("usage")  # Groq nests it in `x_groq`
    if nested is not None and isinstance(nested, Mapping):
        payload = nested
    try:
        report = msgspec.convert(payload, _Report)
    except msgspec.ValidationError:
        report = msgspec.convert(_select_counts(payload, _Report), _Report)
    input_tokens, output_tokens = _choose(report.prompt_tokens, report.input_tokens), report.completion_tokens
    output_tokens = _choose(output_tokens, report.output_tokens)
    if input_tokens is None and output_tokens is None and not report.total_tokens:
        return None
    input_tokens, output_tokens = input_tokens or 0, output_tokens or 0
    input_details = report.prompt_tokens_details or report.input_tokens_details or _NO_DETAILS
    output_details = report.completion_tokens_details or report.output_tokens_details or _NO_DETAILS
    cached = input_details.cached_tokens or _choose(report.prompt_cache_hit_tokens, report.cached_tokens)
    cache_writes = _choose(input_details.cache_write_tokens, input_details.cache_creation_tokens)
    reasoning = output_details.reasoning_tokens or report.reasoning_tokens
    return Usage(
        input_tokens,
        output_tokens,
        report.total_tokens or input_tokens + output_tokens,
        InputTokensDetails(cached or 0, cache_writes or 0),
        OutputTokensDetails(reasoning or 0),
        estimated=report.estimated is True,
    )


def _choose(first: int | None, second: int | None) -> int | None:
    return first if first is not None else second


def _select_counts(payload: Mapping[str, Any], kind: type[Struct]) -> JsonObject:
    """Return the valid counts of a report with invalid ones. A number with a fraction is rounded down."""
    counts: JsonObject = {"estimated": payload.get("estimated")}
    for name in kind.__struct_fields__:
        value = payload.get(name)
        if name.endswith("_details"):
            counts[name] = _select_counts(value, _Details) if isinstance(value, Mapping) else None
        elif name != "estimated" and isinstance(value, int | float) and 0 <= value <= _MAX_COUNT:
            counts[name] = int(value)
    return counts


def estimate_usage(request: CreateRequest, items: Sequence[Item | Unknown], answer: str) -> Usage:
    """Estimate the usage of a turn from its request, its context and the text of the answer."""
    input_tokens = estimate_tokens(request, items)
    output_tokens = estimate_tokens(CreateRequest(instructions=answer), []) if answer else 0
    return Usage(input_tokens, output_tokens, input_tokens + output_tokens, estimated=True)


def estimate_payload_usage(request: JsonObject, items: Iterable[JsonObject], output: Iterable[JsonObject]) -> Usage:
    """Estimate the usage of a turn from JSON. `items` is the whole context, also if the server stores a part of it."""
    input_tokens = estimate_payload_tokens(request, items)
    output_tokens = math.ceil(sum(map(estimate_item, output)))
    return Usage(input_tokens, output_tokens, input_tokens + output_tokens, estimated=True)
