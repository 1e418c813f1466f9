"""How many tokens an answer took: as the server tells it, in one of the ways servers do, or else as we guess."""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage
from antiphon.protocol.unions import Unknown
from antiphon.upstream.token_estimate import estimate_tokens


def read_usage(told: Any) -> Usage | None:
    """The usage in these words, or in a field of theirs that is called so; None if they have none."""
    if not isinstance(told, Mapping):
        return None
    if isinstance(told.get("usage"), Mapping):  # Groq has it in another object
        told = told["usage"]
    asked = _find(told, "prompt_tokens", "input_tokens")
    answered = _find(told, "completion_tokens", "output_tokens")
    if asked is None and answered is None:
        return None
    asked, answered = asked or 0, answered or 0
    read = _look(told, "prompt_tokens_details", "input_tokens_details")
    written = _look(told, "completion_tokens_details", "output_tokens_details")
    cached = _find(read, "cached_tokens") or _find(told, "prompt_cache_hit_tokens", "cached_tokens")
    return Usage(
        asked,
        answered,
        _find(told, "total_tokens") or asked + answered,
        InputTokensDetails(cached or 0, _find(read, "cache_write_tokens", "cache_creation_tokens") or 0),
        OutputTokensDetails(_find(written, "reasoning_tokens") or _find(told, "reasoning_tokens") or 0),
    )


def estimate_usage(request: CreateRequest, items: Sequence[Item | Unknown], answer: str) -> Usage:
    """About what it took, marked as a guess."""
    asked = estimate_tokens(request, items)
    answered = estimate_tokens(CreateRequest(instructions=answer), []) if answer else 0
    return Usage(asked, answered, asked + answered, estimated=True)


def _look(told: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((told[name] for name in names if isinstance(told.get(name), Mapping)), {})


def _find(told: Mapping[str, Any], *names: str) -> int | None:
    numbers = (told.get(name) for name in names)
    return next((int(number) for number in numbers if isinstance(number, int | float) and number >= 0), None)
