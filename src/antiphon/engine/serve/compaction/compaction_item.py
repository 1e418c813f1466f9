"""What a compaction item holds: a summary, the items kept beside it, and the marks of all that it stands for."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from antiphon.engine.sealing import Sealer
from antiphon.protocol import codec
from antiphon.protocol.content import InputText
from antiphon.protocol.items import ITEMS, Compaction, Item, Items, Message
from antiphon.protocol.json_text import read_json
from antiphon.protocol.unions import Unknown

_PURPOSE = "compaction"
_VERSION = 1
_LABEL = (
    "Summary of this conversation so far. Its earlier messages were replaced by this summary; what came last, if "
    "anything, follows it word for word.\n\n"
)
_MARK_BYTES = 6

# Clients send items back with another id or none, and leave out what they do not need.
_PASSING = ("id", "status", "created_by", "phase")


def fingerprint_item(item: Item | Unknown) -> bytes:
    """A short hash of an item, by which it is known again however it comes back."""
    fields: dict[str, Any] = msgspec.json.decode(codec.encode(item))
    if fields.get("type") == "reasoning" and fields.get("encrypted_content"):
        fields = {"sealed": fields["encrypted_content"]}
    for name in _PASSING:
        fields.pop(name, None)
    for name in ("content", "output"):
        fields[name] = _plain(fields.get(name))
    known = {name: value for name, value in fields.items() if value not in (None, [], {})}
    return hashlib.sha256(msgspec.json.encode(known, order="sorted")).digest()[:_MARK_BYTES]


def _plain(content: Any) -> Any:
    """Text is text, whether it comes as such or in a part."""
    if not isinstance(content, list):
        return content
    parts = [part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part for part in content]
    return parts[0] if len(parts) == 1 else parts


class CompactionContent(msgspec.Struct, kw_only=True):
    """`first` comes before the summary (what was asked), `last` after it (what came last)."""

    summary: str
    first: Items
    last: Items
    covered: bytes
    version: int = _VERSION

    def __post_init__(self) -> None:
        self.first = ITEMS.decode_list_field(self.first, "first", required=True)
        self.last = ITEMS.decode_list_field(self.last, "last", required=True)

    def unfold(self) -> list[Item | Unknown]:
        """What the model is to read in the place of what is covered."""
        told: list[Item | Unknown] = [make_summary_message(self.summary)] if self.summary else []
        return [*self.first, *told, *self.last]

    def marks(self) -> Iterator[bytes]:
        """The marks of everything that it stands for."""
        return (self.covered[place : place + _MARK_BYTES] for place in range(0, len(self.covered), _MARK_BYTES))


def make_summary_message(summary: str) -> Message:
    # The user's words, not the developer's: a summary repeats what tools have said, and that must not command.
    return Message("user", [InputText(_LABEL + summary)], status="completed")


def join_fingerprints(marks: Iterable[bytes]) -> bytes:
    return b"".join(dict.fromkeys(marks))


def seal_content(memory: CompactionContent, sealer: Sealer, *, project: str) -> Compaction:
    return Compaction(sealer.seal(codec.encode(memory), project=project, purpose=_PURPOSE))


def unseal_content(item: Compaction, sealer: Sealer, *, project: str) -> CompactionContent | None:
    """None if it was not sealed here for this project, or in a form that is not ours."""
    payload = sealer.open(item.encrypted_content, project=project, purpose=_PURPOSE)
    if payload is None:
        return None
    try:
        memory: CompactionContent = read_json(payload, CompactionContent)
    except msgspec.DecodeError:
        return None
    return memory if memory.version == _VERSION else None


def find_last_compaction(
    items: Sequence[Item | Unknown], sealer: Sealer, *, project: str
) -> tuple[int, CompactionContent] | None:
    """The last compaction among these that opens, and where it stands."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, Compaction):
            memory = unseal_content(item, sealer, project=project)
            if memory is not None:
                return index, memory
    return None
