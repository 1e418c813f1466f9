"""The content of a compaction item: a summary, retained items, and fingerprints of the items that it replaces."""

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
_FINGERPRINT_BYTES = 6

# Fields that are not part of a fingerprint: clients change or omit them when they send an item back.
_VOLATILE_FIELDS = ("id", "status", "created_by", "phase")


def fingerprint_item(item: Item | Unknown) -> bytes:
    """Return a short hash of an item that stays the same when a client sends the item back."""
    fields: dict[str, Any] = msgspec.json.decode(codec.encode(item))
    if fields.get("type") == "reasoning" and fields.get("encrypted_content"):
        fields = {"sealed": fields["encrypted_content"]}
    for name in _VOLATILE_FIELDS:
        fields.pop(name, None)
    for name in ("content", "output"):
        fields[name] = _simplify_content(fields.get(name))
    known = {name: value for name, value in fields.items() if value not in (None, [], {})}
    return hashlib.sha256(msgspec.json.encode(known, order="sorted")).digest()[:_FINGERPRINT_BYTES]


def _simplify_content(content: Any) -> Any:
    """Replace text parts by their text: clients send a text as a string or as a part."""
    if not isinstance(content, list):
        return content
    parts = [part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else part for part in content]
    return parts[0] if len(parts) == 1 else parts


class CompactionContent(msgspec.Struct, kw_only=True):
    """The decrypted content of a compaction item.

    `first` are retained items before the summary (the task), `last` those after it (the latest steps). `covered` are
    the joined fingerprints of all replaced items. The field names are stored with clients: do not change them.
    """

    summary: str
    first: Items
    last: Items
    covered: bytes
    version: int = _VERSION

    def __post_init__(self) -> None:
        self.first = ITEMS.decode_list_field(self.first, "first", required=True)
        self.last = ITEMS.decode_list_field(self.last, "last", required=True)

    def list_items(self) -> list[Item | Unknown]:
        """Return the items that the model reads instead of the replaced ones."""
        summary: list[Item | Unknown] = [make_summary_message(self.summary)] if self.summary else []
        return [*self.first, *summary, *self.last]

    def list_fingerprints(self) -> Iterator[bytes]:
        """Yield the fingerprints of the replaced items."""
        return (
            self.covered[start : start + _FINGERPRINT_BYTES]
            for start in range(0, len(self.covered), _FINGERPRINT_BYTES)
        )


def make_summary_message(summary: str) -> Message:
    # A user message, not a developer message: a summary repeats tool outputs, which must not become instructions.
    return Message("user", [InputText(_LABEL + summary)], status="completed")


def join_fingerprints(fingerprints: Iterable[bytes]) -> bytes:
    return b"".join(dict.fromkeys(fingerprints))


def seal_content(content: CompactionContent, sealer: Sealer, *, project: str) -> Compaction:
    return Compaction(sealer.seal(codec.encode(content), project=project, purpose=_PURPOSE))


def unseal_content(item: Compaction, sealer: Sealer, *, project: str) -> CompactionContent | None:
    """Return the content, or None if the item was sealed with another key, project or version."""
    payload = sealer.open(item.encrypted_content, project=project, purpose=_PURPOSE)
    if payload is None:
        return None
    try:
        content: CompactionContent = read_json(payload, CompactionContent)
    except msgspec.DecodeError:
        return None
    return content if content.version == _VERSION else None


def find_last_compaction(
    items: Sequence[Item | Unknown], sealer: Sealer, *, project: str
) -> tuple[int, CompactionContent] | None:
    """Return the index and the content of the last compaction that can be decrypted."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, Compaction):
            content = unseal_content(item, sealer, project=project)
            if content is not None:
                return index, content
    return None
