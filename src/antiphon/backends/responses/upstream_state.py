"""Responses that the upstream has stored, found by their content.

With `state = "upstream"`, a turn that continues a stored response is sent as that response's id and the new items. This
is only a cache: a turn without a match (evicted, or another process's) is sent whole.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Raw

from antiphon.backends.base import Turn
from antiphon.backends.responses.request import PreviousResponse
from antiphon.protocol import codec
from antiphon.protocol.content import extract_text
from antiphon.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from antiphon.protocol.unions import Unknown
from antiphon.stream.passthrough import decode_output_item

MAX_RESPONSES = 10_000
# Fields that may differ between the upstream's item and ours.
_IGNORED_FIELDS = {"id", "status", "created_by", "encrypted_content"}


class UpstreamState:
    """The most recent stored responses, each by a digest of all items up to its end."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._ids: OrderedDict[bytes, str] = OrderedDict()

    def find_previous(self, turn: Turn, digests: Sequence[bytes] | None = None) -> PreviousResponse | None:
        """Return the newest stored response that this turn continues. `digests` are those of the turn's items."""
        if digests is None:
            digests = hash_prefixes(turn.project, turn.items)
        for length in range(len(digests) - 1, -1, -1):
            response_id = self._ids.get(digests[length])
            if response_id is not None:
                self._ids.move_to_end(digests[length])
                return PreviousResponse(response_id, turn.items[length + 1 :])
        return None

    def add(self, turn: Turn, response_id: str, output: Sequence[Raw]) -> None:
        """Record that the upstream has stored this answer to the turn."""
        items = [decode_output_item(bytes(raw)) for raw in output]
        # The digest of an answer without relevant items would equal that of its input alone.
        if not response_id or all(_encode_relevant(item) is None for item in items):
            return
        self._ids[hash_prefixes(turn.project, [*turn.items, *items])[-1]] = response_id
        while len(self._ids) > self._max_responses:
            self._ids.popitem(last=False)

    def forget(self, previous: PreviousResponse) -> None:
        """Remove a response that the upstream no longer has."""
        lost = [digest for digest, response_id in self._ids.items() if response_id == previous.id]
        for digest in lost:
            del self._ids[digest]


def hash_prefixes(project: str, items: Iterable[Item | Unknown]) -> list[bytes]:
    """Return a digest for each item, of all items up to it."""
    digest = blake2b(project.encode(), digest_size=16)
    digests: list[bytes] = []
    for item in items:
        encoded = _encode_relevant(item)
        if encoded is not None:
            digest.update(encoded)
            digest.update(b"\0")
        digests.append(digest.digest())
    return digests


def _encode_relevant(item: Item | Unknown) -> bytes | None:
    """Encode the fields that identify an item. Ids differ here and upstream, and reasoning is sealed anew."""
    match item:
        case Message():
            value = extract_text(item.content) if item.role == "assistant" else item.content
            return codec.encode([item.type, item.role, value])
        case FunctionCall():
            return codec.encode([item.type, item.call_id, item.name, item.arguments])
        case CustomToolCall():
            return codec.encode([item.type, item.call_id, item.name, item.input])
        case FunctionCallOutput() | CustomToolCallOutput():
            return codec.encode([item.type, item.call_id, item.output])
        case Reasoning():
            return None
        case _:
            fields = msgspec.json.decode(codec.encode(item))
            relevant = {name: fields[name] for name in fields.keys() - _IGNORED_FIELDS}
            return msgspec.json.encode(relevant, order="sorted")
