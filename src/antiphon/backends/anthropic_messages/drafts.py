"""The blocks of a message that are being written."""

import msgspec
from msgspec import Raw

from antiphon.backends.anthropic_messages.wire import Block, BlockDelta, ThinkingBlock

# Every other block may be told more of as JSON: those of calls, and those that only the upstream understands.
_WORDS = ("text", "thinking")


class Draft:
    """A block so far. `key` is a number of ours: not every server counts its blocks right."""

    def __init__(self, index: int | None, key: int, block: Block, raw: Raw) -> None:
        self.index = index
        self.key = key
        self.block = block
        self.type = block.type
        self.raw = raw
        self.thinking: list[str] = [block.thinking or ""]
        self.signature: list[str] = [block.signature or ""]
        self.json: list[str] = []

    @property
    def arguments(self) -> str:
        """A call's arguments: as they came in pieces, else as they stood in the block."""
        whole = bytes(self.block.input).decode()
        return "".join(self.json) or ("{}" if whole in ("", "null") else whole)

    def assemble(self) -> ThinkingBlock | Raw | dict[str, Raw]:
        """A block to be given back as it was: thinking, or what a tool of the upstream's own was asked and said."""
        if self.type == "thinking":
            return ThinkingBlock("".join(self.thinking), "".join(self.signature))
        if not self.json:
            return self.raw
        return msgspec.json.decode(self.raw, type=dict[str, Raw]) | {"input": Raw(self.arguments.encode())}

    def takes(self, kind: str) -> bool:
        return self.type == kind if kind in _WORDS else self.type not in _WORDS


class Drafts:
    """All blocks that are open. Calls are written side by side; of others there is one at a time."""

    def __init__(self) -> None:
        self._open: list[Draft] = []

    def add(self, draft: Draft) -> list[Draft]:
        """Open a block. Those that have ended with that are returned: not every server says when one has."""
        over = [each for each in self._open if each.type != "tool_use" or _replaces(draft, each)]
        self._open = [*(each for each in self._open if each not in over), draft]
        return over

    def find(self, index: int | None, kind: str) -> Draft | None:
        """The block that a delta of this kind is about: by its index, or the last one if either has none."""
        for draft in reversed(self._open):
            if (index is None or draft.index is None or draft.index == index) and draft.takes(kind):
                return draft
        return None

    def remove(self, index: int | None) -> Draft | None:
        """The block that has ended; None if it had before."""
        for draft in reversed(self._open):
            if index is None or draft.index is None or draft.index == index:
                self._open.remove(draft)
                return draft
        return None

    def clear(self) -> list[Draft]:
        """All of them have ended."""
        over, self._open = self._open, []
        return over


def _replaces(draft: Draft, call: Draft) -> bool:
    return draft.type == "tool_use" and draft.index == call.index


def find_kind(delta: BlockDelta) -> str | None:
    """What a delta is more of; None if that is nothing, or nothing we know."""
    if delta.text:  # nearly always
        return "text"
    if delta.partial_json:
        return "json"
    return "thinking" if delta.thinking or delta.signature else None
