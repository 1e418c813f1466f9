"""Token usage of an answer: parsed from the formats that servers send, or estimated."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from antiphon.protocol.items import Item
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.upstream.token_estimate import estimate_item, estimate_payload_tokens, estimate_tokens


def parse_usage(payload: Any) -> Usage | None:
    """Return the usage in an object, or in its field `usage`. Return None if it contains no counts."""
    if not isinstance(payload, Mapping):
        return None
    if isinstance(payload.get("usage"), Mapping):  # Groq nests it in `x_groq`
        payload = payload["usage"]
    input_tokens = _find_count(payload, "prompt_tokens", "input_tokens")
    output_tokens = _find_count(payload, "completion_tokens", "output_tokens")
    total_tokens = _find_count(payload, "total_tokens")
    if input_tokens is None and output_tokens is None and not total_tokens:
        return None
    input_tokens, output_tokens = input_tokens or 0, output_tokens or 0
    input_details = _find_details(payload, "prompt_tokens_details", "input_tokens_details")
    output_details = _find_details(payload, "completion_tokens_details", "output_tokens_details")
    cached = _find_count(input_details, "cached_tokens") or _find_count(
        payload, "prompt_cache_hit_tokens", "cached_tokens"
    )
    cache_writes = _find_count(input_details, "cache_write_tokens", "cache_creation_tokens")
    reasoning = _find_count(output_details, "reasoning_tokens") or _find_count(payload, "reasoning_tokens")
    return Usage(
        input_tokens,
        output_tokens,
        total_tokens or input_tokens + output_tokens,
        InputTokensDetails(cached or 0, cache_writes or 0),
        OutputTokensDetails(reasoning or 0),
        estimated=payload.get("estimated") is True,
    )


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


def _find_details(payload: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((payload[name] for name in names if isinstance(payload.get(name), Mapping)), {})


def _find_count(payload: Mapping[str, Any], *names: str) -> int | None:
    numbers = (payload.get(name) for name in names)
    return next((int(number) for number in numbers if isinstance(number, int | float) and number >= 0), None)
