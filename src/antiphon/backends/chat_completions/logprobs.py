"""The probabilities of an answer's tokens."""

from collections.abc import Mapping
from typing import Any

from antiphon.protocol.content import LogProb, TopLogProb


def read_logprobs(told: Any) -> tuple[LogProb, ...]:
    """Those in a choice's `logprobs`."""
    listed = told.get("content") if isinstance(told, Mapping) else None
    if not isinstance(listed, list):
        return ()
    return tuple(
        LogProb(
            each["token"],
            each["logprob"],
            _read_bytes(each),
            [TopLogProb(top["token"], top["logprob"], _read_bytes(top)) for top in _list_top(each) if _is_one(top)],
        )
        for each in listed
        if _is_one(each)
    )


def _is_one(told: Any) -> bool:
    return (
        isinstance(told, Mapping)
        and isinstance(told.get("token"), str)
        and isinstance(told.get("logprob"), int | float)
    )


def _list_top(told: Mapping[str, Any]) -> list[Any]:
    top = told.get("top_logprobs")
    return top if isinstance(top, list) else []


def _read_bytes(told: Mapping[str, Any]) -> list[int]:
    found = told.get("bytes")
    return found if isinstance(found, list) else list(told["token"].encode(errors="surrogatepass"))
