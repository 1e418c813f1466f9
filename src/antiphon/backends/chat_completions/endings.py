"""Why models stop, in the words of many servers."""

from typing import Literal

Reason = Literal["stop", "length", "content_filter"]

_LENGTH = {"length", "max_tokens", "max_output_tokens", "model_length"}
_FILTERED = {"content_filter", "safety", "recitation", "sensitive", "blocklist", "prohibited_content"}
_BROKEN = {"error", "abort", "cancelled", "network_error", "insufficient_system_resource"}


def read_ending(word: str) -> Reason | None:
    """What this word for the end means; None for one that is no end, but a failure. New words mean that it is done."""
    word = word.lower()
    if word in _BROKEN or "malformed_function_call" in word:
        return None
    if word in _LENGTH:
        return "length"
    return "content_filter" if word in _FILTERED else "stop"
