"""A conversation as plain text of any size: what a summariser reads, and what there is when it writes nothing."""

from collections.abc import Sequence

from antiphon.engine.compaction.clipping import clip
from antiphon.protocol import codec, items
from antiphon.protocol.content import text_of
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown

_LONGEST_ENTRY = 4000
_SHORTEST_ENTRY = 200


def write_transcript(conversation: Sequence[Item | Unknown], size: int) -> str:
    """At most so many characters. Long entries lose their middle first, then whole entries in the middle go."""
    longest = max(_SHORTEST_ENTRY, min(_LONGEST_ENTRY, size // max(1, len(conversation))))
    entries = [entry for item in conversation if (entry := _write(item, longest))]
    if sum(len(entry) + 1 for entry in entries) <= size:
        return "\n".join(entries)
    head = _take(entries, size // 3)
    tail = _take(entries[len(head) :][::-1], size // 2)[::-1]
    gone = len(entries) - len(head) - len(tail)
    return clip("\n".join([*head, f"[... {gone} entries were left out here ...]", *tail]), size)


def _take(entries: Sequence[str], size: int) -> list[str]:
    """The first of these that have room, and at least one."""
    taken: list[str] = []
    for entry in entries:
        size -= len(entry) + 1
        if taken and size < 0:
            break
        taken.append(entry)
    return taken


def _write(item: Item | Unknown, longest: int) -> str:
    match item:
        case items.Message():
            return f"{item.role}: {clip(text_of(item.content), longest)}"
        case items.FunctionCall():
            return f"assistant calls {item.name}: {clip(item.arguments, longest)}"
        case items.CustomToolCall():
            return f"assistant calls {item.name}: {clip(item.input, longest)}"
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            return f"tool answers: {clip(text_of(item.output), longest)}"
        case items.Reasoning():
            # Sealed or not, it was for the turn it led to; its summary is what others may know of it.
            summary = text_of([*item.summary])
            return f"assistant thinks: {clip(summary, longest)}" if summary else ""
    return f"{item.type}: {clip(codec.encode(item).decode(), longest)}"
