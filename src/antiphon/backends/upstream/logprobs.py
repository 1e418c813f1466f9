"""The probabilities of an answer's tokens, as far as they are told in full."""

from typing import Any

from antiphon.protocol.content import LogProb, TopLogProb


def read_logprobs(told: Any) -> tuple[LogProb, ...]:
    """The tokens of a list, each with those that might have stood in its place."""
    return tuple(
        LogProb(*_read_token(each), [TopLogProb(*_read_token(top)) for top in _list_tokens(each.get("top_logprobs"))])
        for each in _list_tokens(told)
    )


def _list_tokens(told: Any) -> list[dict[str, Any]]:
    return [each for each in told if _is_token(each)] if isinstance(told, list) else []


def _is_token(told: Any) -> bool:
    return (
        isinstance(told, dict) and isinstance(told.get("token"), str) and isinstance(told.get("logprob"), int | float)
    )


def _read_token(told: dict[str, Any]) -> tuple[str, float, list[int]]:
    token, octets = told["token"], told.get("bytes")
    if not isinstance(octets, list) or not all(isinstance(each, int) for each in octets):
        octets = list(token.encode(errors="surrogatepass"))
    return token, told["logprob"], octets
