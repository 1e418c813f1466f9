"""Sealed reasoning: what only the server that made it can read. Some models seal none, and some seals do not open."""

from collections.abc import Sequence

from msgspec import Struct

from antiphon.agent.entries import JsonObject
from antiphon.agent.history import is_hollow
from antiphon.errors import AntiphonError, InvalidRequest

SEALED = "reasoning.encrypted_content"
"""What a request includes so that the reasoning can be sent back."""

LOST = "The server cannot read the reasoning of earlier turns any more. The conversation goes on without it."

_UNREADABLE = "invalid_encrypted_content"
_UNSUPPORTED = "encrypted content is not supported"


class Sealing(Struct):
    """Whether a model has refused to seal its reasoning. It is not asked to again."""

    refused: bool = False


def refuses_to_seal(error: AntiphonError) -> bool:
    """Whether the model would answer, if only it were not asked to seal its reasoning."""
    if error.type != InvalidRequest.type:
        return False
    # Servers in between may lose which parameter it was about.
    about = (error.param or "").startswith("include") or SEALED in error.message
    return about or _UNSUPPORTED in error.message.lower()


def cannot_open(error: AntiphonError) -> bool:
    """Whether the server cannot read what was sealed: with a key that it has no more, or for somebody else."""
    return error.code == _UNREADABLE


def is_sealed(item: JsonObject) -> bool:
    return item.get("type") == "reasoning" and bool(item.get("encrypted_content"))


def unseal(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Without what was sealed: of that reasoning stays what anybody can read."""
    kept: list[JsonObject] = []
    for item in items:
        if is_sealed(item):
            open_part = {name: value for name, value in item.items() if name != "encrypted_content"}
            kept += [] if is_hollow(open_part) else [open_part]
        else:
            kept.append(item)
    return kept
