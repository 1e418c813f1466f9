"""Which responses the upstream has kept, by what was said in them: with `state = "upstream"`, only what is new is sent.

Nothing depends on it. What is not found here, because it was too long ago or another process asked for it, is sent
whole again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Raw

from antiphon.backends.base import Turn
from antiphon.backends.responses.request import Continuation
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

MOST_RESPONSES = 10_000
# What an item may have here and not there, or have otherwise.
_OTHERWISE = {"id", "status", "created_by", "encrypted_content"}


class Memory:
    """The last responses, each under a mark of everything that was said up to its end."""

    def __init__(self, most: int = MOST_RESPONSES) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    def find(self, turn: Turn) -> Continuation | None:
        """The newest response that this turn continues, and what comes after it."""
        marks = _mark(turn.project, turn.items)
        for length in range(len(marks) - 1, -1, -1):
            response_id = self._kept.get(marks[length])
            if response_id is not None:
                self._kept.move_to_end(marks[length])
                return Continuation(response_id, turn.items[length + 1 :])
        return None

    def learn(self, turn: Turn, response_id: str, output: Sequence[Raw]) -> None:
        """The upstream has kept this answer to the turn."""
        told = [decode_output_item(bytes(raw)) for raw in output]
        # An answer that leaves no mark would be found by everyone who asks the same question.
        if not response_id or all(_read(item) is None for item in told):
            return
        self._kept[_mark(turn.project, [*turn.items, *told])[-1]] = response_id
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def forget(self, continuation: Continuation) -> None:
        """The upstream does not have this one any more."""
        lost = [mark for mark, kept in self._kept.items() if kept == continuation.previous_response_id]
        for mark in lost:
            del self._kept[mark]


def _mark(project: str, items: Iterable[Item | Unknown]) -> list[bytes]:
    """For each item, a mark of everything up to it."""
    digest = blake2b(project.encode(), digest_size=16)
    marks: list[bytes] = []
    for item in items:
        read = _read(item)
        if read is not None:
            digest.update(read)
            digest.update(b"\0")
        marks.append(digest.digest())
    return marks


def _read(item: Item | Unknown) -> bytes | None:
    """What counts of an item. Ids are others there and here, and reasoning is sealed anew on its way."""
    match item:
        case Message():
            words = extract_text(item.content)
            return codec.encode([item.type, item.role, words if item.role == "assistant" else item.content])
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
            return msgspec.json.encode({name: fields[name] for name in fields.keys() - _OTHERWISE}, order="sorted")
