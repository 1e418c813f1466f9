"""The arguments of past calls, for servers that read them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.protocol.content import LogProb, TopLogProb
from antiphon.stream.deltas import Delta, Served

_OBJECT = msgspec.json.Decoder(dict[str, Any])


def normalize_arguments(arguments: str) -> str:
    """The arguments as the model wrote them. What is no JSON object is told as text in one.

    Many servers read what was once called for, and would refuse the whole conversation for one slip of their model.
    """
    try:
        _OBJECT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.json.encode({"arguments": arguments}).decode() if arguments.strip() else "{}"
    return arguments


def parse_logprobs(told: Any) -> tuple[LogProb, ...]:
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


LONGEST_NAME = 200


class ServedModel:
    """Of one answer. `backend` is what the configuration calls the upstream, `asked` the model that was asked for."""

    def __init__(self, backend: str, asked: str) -> None:
        self._backend = backend
        self._asked = asked
        self._name = asked

    def observe(self, name: Any) -> None:
        """What the upstream calls the model. Not every server keeps to names."""
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME:
            self._name = name

    def announce(self, told: Sequence[Delta]) -> Sequence[Delta]:
        """The first words, and who says them, if that is to be told."""
        if self._name == self._asked:
            return told
        return [Served(self._asked, self._backend, self._name), *told]
