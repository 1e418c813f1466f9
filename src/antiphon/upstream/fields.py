"""Fields that several APIs share: tool-call arguments, annotations, log probabilities, and the name of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from antiphon.errors import UpstreamError
from antiphon.protocol.content import ANNOTATIONS, Annotation, LogProb, TopLogProb
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Served
from antiphon.stream.limits import ANSWER_TOO_LARGE

MAX_NAME_LENGTH = 200

MAX_LIST_LENGTH = 10_000
"""Limit for the entries of a list, such as parts, annotations or images. Reading each takes some microseconds."""

_OBJECT = msgspec.json.Decoder(JsonObject)


class ServedModel:
    """The model that answers one request.

    `backend` is the backend's name in the configuration, `requested` the model in the request.
    """

    def __init__(self, backend: str, requested: str) -> None:
        self._backend = backend
        self._requested = requested
        self._name = requested

    def observe(self, name: Any) -> None:
        """Record the model name in the upstream's answer, unless it is not a usable name."""
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_LENGTH:
            self._name = name

    def announce(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Prepend `Served` to the first deltas if another model answers than requested."""
        if self._name == self._requested:
            return deltas
        return [Served(self._requested, self._backend, self._name), *deltas]


def normalize_arguments(arguments: str) -> str:
    """Return the arguments of an earlier tool call unchanged, or wrapped if they are not a JSON object.

    Many servers parse the arguments in the history, and would reject the whole conversation.
    """
    try:
        _OBJECT.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.json.encode({"arguments": arguments}).decode() if arguments.strip() else "{}"
    return arguments


def read_list(payload: Any) -> list[Any]:
    """Return a list in a message, or an empty one for any other value. Raises if it has too many entries."""
    if not isinstance(payload, list):
        return []
    if len(payload) > MAX_LIST_LENGTH:
        raise UpstreamError(
            f"The upstream sent a list with more than {MAX_LIST_LENGTH} entries.", code=ANSWER_TOO_LARGE
        )
    return payload


def parse_logprobs(payload: Any) -> tuple[LogProb, ...]:
    """Parse a list of tokens, each with its alternatives. Malformed entries are skipped."""
    return tuple(
        LogProb(
            *_parse_token(token), [TopLogProb(*_parse_token(top)) for top in _list_tokens(token.get("top_logprobs"))]
        )
        for token in _list_tokens(payload)
    )


def parse_annotation(payload: Any) -> Annotation | Unknown | None:
    """Return an annotation of the Responses API, or None if it has no type. Unknown types are kept unchanged.

    A missing text is empty and a missing number is 0, because clients require both. The fields may be nested in one
    with the name of the type, as in Chat Completions.
    """
    if not isinstance(payload, Mapping) or not isinstance(payload.get("type"), str):
        return None
    struct: Any = ANNOTATIONS.members.get(payload["type"])
    if struct is None:
        return Unknown(msgspec.json.encode(payload))
    nested = payload.get(payload["type"])
    fields = nested if isinstance(nested, Mapping) else payload
    values = ((fields.get(name), kind) for name, kind in struct.__annotations__.items())
    annotation: Annotation = struct(*(value if type(value) is kind else kind() for value, kind in values))
    return annotation


def _list_tokens(payload: Any) -> list[JsonObject]:
    return [entry for entry in payload if _is_token(entry)] if isinstance(payload, list) else []


def _is_token(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("token"), str)
        and isinstance(entry.get("logprob"), int | float)
    )


def _parse_token(entry: JsonObject) -> tuple[str, float, list[int]]:
    token, octets = entry["token"], entry.get("bytes")
    if not isinstance(octets, list) or not all(isinstance(octet, int) for octet in octets):
        octets = list(token.encode(errors="surrogatepass"))
    return token, entry["logprob"], octets
