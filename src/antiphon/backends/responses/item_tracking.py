"""The state of an answer's output items while its events are read.

Events refer to items by id and by index, and some servers send a wrong one. `UpstreamItems` finds the item that is
meant. `ItemCompleter` emits the deltas that an item is missing when the server sends it whole.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.responses import wire
from antiphon.backends.responses.wire import UpstreamEvent
from antiphon.protocol.items import Message, Reasoning
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.limits import AnswerLimits
from antiphon.stream.passthrough import decode_output_item
from antiphon.upstream.fields import parse_logprobs

# Items of all other types are passed through.
ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call", "passthrough"]
_KINDS: dict[str, ItemKind] = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
}
# The fields that our deltas can express, by kind.
_EXPRESSIBLE = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments", "namespace"}),
    "custom_tool_call": frozenset({"type", "id", "status", "call_id", "name", "input", "namespace"}),
}
_EXPRESSIBLE_PARTS = {"message": ("output_text", "refusal"), "reasoning": ("reasoning_text",)}
# Texts of an item with more parts are not compared: an upstream could make that expensive.
_MAX_COMPARED_TEXTS = 16
_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}


def find_kind(item_type: Any) -> ItemKind:
    return _KINDS.get(item_type, "passthrough") if isinstance(item_type, str) else "passthrough"


class UpstreamItem:
    """An output item in progress, and the text emitted of it so far. `part` is the content index of that text."""

    def __init__(self, key: int, kind: ItemKind) -> None:
        self.key = key
        self.kind = kind
        self.type: Any = None if kind == "passthrough" else kind
        self.call_id: Any = None
        self.phase: Any = None
        self.has_status = True
        self.part: int | None = None
        self.is_announced = False  # the delta with a call's name has been emitted
        self.is_closed = False
        self.annotations: dict[int, int] = {}  # the number of annotations emitted, by content index
        self.held_events: list[bytes] = []  # unknown events of the item, until it is open
        self._texts: dict[tuple[str, int], list[str]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._texts and not self.annotations

    @property
    def is_text(self) -> bool:
        return self.kind in ("message", "reasoning")

    @property
    def is_waiting(self) -> bool:
        """True if no delta has opened the item yet. A call is opened by its name."""
        if self.is_closed or self.kind == "passthrough":
            return False
        return self.is_empty if self.is_text else not self.is_announced

    def take_held_events(self) -> list[Delta]:
        """Return the deltas that forward the held events of the item, which is open now."""
        held, self.held_events = self.held_events, []
        key = None if self.is_text else self.key
        return [deltas.ItemPassthrough(Unknown(event), key) for event in held]

    def add_text(self, field: str, index: int, text: str) -> str:
        """Record a text delta and return it."""
        self._texts.setdefault((field, index), []).append(text)
        return text

    def find_index(self, field: str, index: int, whole: str, taken: set[tuple[str, int]]) -> int:
        """Return the index that a whole text has in its deltas, and add it to `taken`. Some servers count differently.

        An index that is taken, or has no deltas, stands for the first equal text that is not taken. If there is none,
        the text is a new one.
        """
        is_taken = (field, index) in taken
        has_deltas = (field, index) in self._texts or (field == "text" and index in self.annotations)
        if (is_taken or not has_deltas) and len(self._texts) <= _MAX_COMPARED_TEXTS:
            others = [key for key in self._texts if key[0] == field and key not in taken]
            unused = 1 + max(key[1] for key in (*self._texts, *taken)) if is_taken else index
            index = next((key[1] for key in others if self._join_text(key) == whole), unused)
        taken.add((field, index))
        return index

    def _join_text(self, key: tuple[str, int]) -> str:
        """Return a recorded text. Its deltas are joined once, not again for each repeated event."""
        text = "".join(self._texts.get(key, ()))
        if text:
            self._texts[key] = [text]
        return text

    def join_texts(self) -> str:
        """Return all texts of the item so far."""
        return "".join(map(self._join_text, tuple(self._texts)))

    def has_texts(self, fields: dict[str, Any]) -> bool:
        """Return True if the deltas so far have exactly the texts of these final fields."""
        parts = [*wire.list_objects(fields.get("summary")), *wire.list_objects(fields.get("content"))]
        texts = [wire.read_text(part.get("refusal" if part.get("type") == "refusal" else "text")) for part in parts]
        return sorted(filter(None, texts)) == sorted(filter(None, map(self._join_text, tuple(self._texts))))

    def add_missing_text(self, field: str, index: int, whole: str) -> str:
        """Record and return the end of a whole text that no delta had: servers omit deltas."""
        known = self._join_text((field, index))
        rest = whole[len(known) :] if whole.startswith(known) else ""
        return self.add_text(field, index, rest) if rest else ""


class CurrentItem:
    """The item that text deltas extend in the composer. The first delta of another item closes it there."""

    def __init__(self) -> None:
        self.item: UpstreamItem | None = None

    def switch_to(self, item: UpstreamItem, part: int | None = None) -> list[Delta]:
        """Return the deltas that must precede more text of this item and part."""
        preceding: list[Delta] = []
        if self.item is not item:
            if self.item is not None and self.item.kind == item.kind:
                preceding.append(deltas.CloseItem())
            if item.kind == "message" and item.phase in ("commentary", "final_answer"):
                preceding.append(deltas.Phase(item.phase))
            if item.kind == "reasoning" and not item.has_status:
                preceding.append(deltas.NoStatus())
            self.item = item
        elif part is not None and item.part is not None and part != item.part:
            preceding.append(deltas.NewPart())
        if part is not None:
            item.part = part
        return preceding

    def clear(self) -> None:
        self.item = None


class UpstreamItems:
    """All output items of an answer. Raises an error if there are more than `limits` permit."""

    def __init__(self, limits: AnswerLimits) -> None:
        self._limits = limits
        self._items: list[UpstreamItem] = []
        self._by_id: dict[str, UpstreamItem] = {}
        self._by_index: dict[int, UpstreamItem] = {}
        self._open: dict[ItemKind, list[UpstreamItem]] = {}  # closed ones are removed when they are found

    def __iter__(self) -> Iterator[UpstreamItem]:
        return iter(self._items)

    def add(self, kind: ItemKind, item_id: Any, output_index: Any) -> UpstreamItem:
        if len(self._items) >= self._limits.max_answer_items:
            raise self._limits.make_error("max_answer_items")
        item = UpstreamItem(len(self._items), kind)
        self._items.append(item)
        self._open.setdefault(kind, []).append(item)
        if isinstance(item_id, str) and item_id:
            self._by_id[item_id] = item
        if isinstance(output_index, int):
            self._by_index[output_index] = item
        return item

    def find(self, item_id: Any, output_index: Any, kind: ItemKind | None = None) -> UpstreamItem | None:
        """Return the item by its id, else by its index. Without an index, return the last open one of the kind."""
        by_id = self._by_id.get(item_id) if isinstance(item_id, str) else None
        if by_id is not None and _has_kind(by_id, kind):
            return by_id
        if isinstance(output_index, int):
            by_index = self._by_index.get(output_index)
            return by_index if by_index is not None and _has_kind(by_index, kind) else None
        return None if kind is None else self._find_last_open(kind)

    def find_ended(self, kind: ItemKind, fields: dict[str, Any]) -> UpstreamItem | None:
        """Return the open item with these final fields. Some servers end an item with the index of the next one."""
        item = self._find_last_open(kind)
        if item is None:
            return None
        if item.is_text:
            return item if not item.is_empty and item.has_texts(fields) else None
        is_same_call = item.call_id is not None and item.call_id == fields.get("call_id")
        return item if is_same_call and item.type == fields.get("type") else None

    def _find_last_open(self, kind: ItemKind) -> UpstreamItem | None:
        candidates = self._open.get(kind, [])
        while candidates and candidates[-1].is_closed:
            candidates.pop()
        return candidates[-1] if candidates else None

    def find_or_add(self, event: UpstreamEvent, kind: ItemKind) -> UpstreamItem:
        """Return the item that a delta extends. An item that was not announced is added."""
        item = self.find(event.item_id, event.output_index, kind)
        if item is None or self.is_index_reused(item, event.item_id):
            return self.add(kind, event.item_id, event.output_index)
        return item

    def is_index_reused(self, item: UpstreamItem, item_id: Any) -> bool:
        """Return True if the item was found by an index that now belongs to another item."""
        return item.is_closed and not (isinstance(item_id, str) and item_id in self._by_id)

    def match(self, output: list[dict[str, Any]]) -> list[UpstreamItem | None]:
        """Return the known item for each item of a final list: by id, by call id, else the next of its type."""
        matched = [self._by_id.get(item["id"]) if isinstance(item.get("id"), str) else None for item in output]
        known = {id(item) for item in matched if item is not None}
        left = _UnmatchedItems(item for item in self._items if id(item) not in known)
        # Each known item matches once: some servers give two calls one call id.
        for take in (left.take_call, left.take_next):
            for position, fields in enumerate(output):
                if matched[position] is None:
                    matched[position] = take(fields)
        return matched


class _UnmatchedItems:
    """The known items that no item of the final list matches yet, in order."""

    def __init__(self, items: Iterable[UpstreamItem]) -> None:
        self._left: dict[int, UpstreamItem] = {item.key: item for item in items}
        self._by_type: dict[str, deque[UpstreamItem]] = {}
        self._by_call: dict[tuple[str, str], deque[UpstreamItem]] = {}
        for item in self._left.values():
            kind, call_id = repr(item.type), repr(item.call_id)  # both may be any JSON value, even a list
            self._by_type.setdefault(kind, deque()).append(item)
            self._by_call.setdefault((kind, call_id), deque()).append(item)

    def take_call(self, fields: dict[str, Any]) -> UpstreamItem | None:
        """Take the first item with the type and call id of these fields."""
        if fields.get("call_id") is None:
            return None
        found = self._find_first(self._by_call.get((repr(fields.get("type")), repr(fields["call_id"]))))
        return self._take(found)

    def take_next(self, fields: dict[str, Any]) -> UpstreamItem | None:
        """Take the first item with the type of these fields, or without a type."""
        typed = self._find_first(self._by_type.get(repr(fields.get("type"))))
        untyped = self._find_first(self._by_type.get(repr(None)))
        found = min((each for each in (typed, untyped) if each is not None), key=lambda item: item.key, default=None)
        return self._take(found if found is not None and found.kind == find_kind(fields.get("type")) else None)

    def _find_first(self, candidates: deque[UpstreamItem] | None) -> UpstreamItem | None:
        while candidates and candidates[0].key not in self._left:
            candidates.popleft()
        return candidates[0] if candidates else None

    def _take(self, item: UpstreamItem | None) -> UpstreamItem | None:
        return self._left.pop(item.key) if item is not None else None


def _find_ending(fields: dict[str, Any]) -> Literal["completed", "incomplete"]:
    return "incomplete" if fields.get("status") == "incomplete" else "completed"


def _has_kind(item: UpstreamItem, kind: ItemKind | None) -> bool:
    return kind is None or item.kind == kind


class ItemCompleter:
    """Emits the deltas that complete one item, or a part of it, from its final fields."""

    def __init__(self, item: UpstreamItem, current: CurrentItem) -> None:
        self._item = item
        self._current = current

    def close(self, raw: Raw, fields: dict[str, Any]) -> Sequence[Delta]:
        item = self._item
        item.is_closed = True
        if item.kind == "passthrough":
            return [deltas.CloseItem(item.key, decode_output_item(bytes(raw)))]
        if item.kind in ("function_call", "custom_tool_call"):
            emitted = self.announce_call(fields) + self.complete_call(fields)
            is_cut_off = fields.get("status") == "incomplete"
            if item.kind == "function_call" and not item.join_texts() and not is_cut_off:
                emitted.append(deltas.ToolCall(item.key, "{}"))  # clients expect an object
            return emitted + self._emit_close(fields, item.key)
        return self._close_text_item(raw, fields)

    def _close_text_item(self, raw: Raw, fields: dict[str, Any]) -> list[Delta]:
        item, current = self._item, self._current
        emitted: list[Delta] = []
        taken: set[tuple[str, int]] = set()
        for index, part in enumerate(wire.list_objects(fields.get("summary"))):
            emitted += self.complete_summary(index, part.get("text"), taken)
        for index, part in enumerate(wire.list_objects(fields.get("content"))):
            emitted += self.complete_part(index, part, taken)
        seal = fields.get("encrypted_content")
        if item.is_empty and not seal:
            return self._emit_whole(raw, fields)
        # The composer has closed an item that another one has followed.
        is_closed_already = current.item is not item and not item.is_empty
        if item.kind == "reasoning" and seal and not is_closed_already:
            emitted += current.switch_to(item)
            if item.held_events:
                emitted += [deltas.ReasoningSeal(""), *item.take_held_events()]
            sealed = deltas.ReasoningSeal(wire.read_text(seal), wire.read_text(fields.get("id")))
            emitted += [*self._emit_amendments(fields, None), sealed]
        elif current.item is item:
            emitted += [*item.take_held_events(), *self._emit_close(fields, None)]
        if current.item is item:
            current.clear()
        return emitted

    def _emit_whole(self, raw: Raw, fields: dict[str, Any]) -> list[Delta]:
        """Emit an item without content as a whole: no text delta can create it."""
        item = decode_output_item(bytes(raw))
        if isinstance(item, Message) or (isinstance(item, Reasoning) and item.status is not None):
            item.status = _find_ending(fields)  # some servers omit it, or send that of the beginning
        self._current.clear()
        if isinstance(item, Message | Reasoning) and not self._item.held_events:
            return [deltas.WholeItem(msgspec.structs.replace(item, id=None))]
        key = self._item.key
        held = [deltas.ItemPassthrough(Unknown(event), key) for event in self._item.held_events]
        return [deltas.OpenItem(key, item, _ID_PREFIXES[self._item.kind]), *held, deltas.CloseItem(key, item)]

    def _emit_close(self, fields: dict[str, Any], key: int | None) -> list[Delta]:
        return [*self._emit_amendments(fields, key), deltas.CloseItem(key, ending=_find_ending(fields))]

    def _emit_amendments(self, fields: dict[str, Any], key: int | None) -> list[Delta]:
        """Emit the fields that other deltas cannot express."""
        kind = self._item.kind
        more = {name: value for name, value in fields.items() if name not in _EXPRESSIBLE[kind] and value is not None}
        if kind in _EXPRESSIBLE_PARTS and any(
            part.get("type") not in _EXPRESSIBLE_PARTS[kind] for part in wire.list_objects(fields.get("content"))
        ):
            more["content"] = fields["content"]
        if kind == "message" and fields.get("phase") is not None and fields["phase"] != self._item.phase:
            more["phase"] = fields["phase"]
        encoded = {name: Raw(msgspec.json.encode(value)) for name, value in more.items()}
        return [deltas.Amend(encoded, key)] if encoded else []

    # Content and summary parts

    def complete_part(self, index: int, part: dict[str, Any], taken: set[tuple[str, int]] | None = None) -> list[Delta]:
        """Emit the end of a part that no delta had. `taken` are the texts that other parts of the item stand for."""
        item, current = self._item, self._current
        field = "refusal" if item.kind == "message" and part.get("type") == "refusal" else "text"
        if item.kind == "message" and part.get("type") not in _EXPRESSIBLE_PARTS["message"]:
            return []
        whole = wire.read_text(part.get(field))
        index = item.find_index(field, index, whole, set() if taken is None else taken)
        rest = item.add_missing_text(field, index, whole)
        if item.kind == "reasoning":
            return [*current.switch_to(item, index), deltas.Reasoning(rest)] if rest else []
        if field == "refusal":
            return [*current.switch_to(item, index), deltas.Refusal(rest)] if rest else []
        emitted: list[Delta] = []
        if rest:
            logprobs = parse_logprobs(part.get("logprobs")) if rest == whole else ()
            emitted += [*current.switch_to(item, index), deltas.Text(rest, logprobs)]
        return emitted + self._complete_annotations(index, part.get("annotations"))

    def _complete_annotations(self, index: int, annotations: Any) -> list[Delta]:
        item = self._item
        missing = wire.list_objects(annotations)[item.annotations.get(index, 0) :]
        if not missing:
            return []
        item.annotations[index] = item.annotations.get(index, 0) + len(missing)
        emitted = [deltas.Annotate(wire.read_annotation(each)) for each in missing]
        return [*self._current.switch_to(item, index), *emitted]

    def complete_summary(self, index: int, text: Any, taken: set[tuple[str, int]] | None = None) -> list[Delta]:
        whole = wire.read_text(text)
        index = self._item.find_index("summary", index, whole, set() if taken is None else taken)
        rest = self._item.add_missing_text("summary", index, whole)
        return [*self._current.switch_to(self._item), deltas.ReasoningSummary(rest, index)] if rest else []

    # Calls

    def announce_call(self, fields: dict[str, Any]) -> list[Delta]:
        """Emit the first delta of a call as soon as its name is known."""
        item = self._item
        name = fields.get("name")
        if item.is_announced or not isinstance(name, str) or not name:
            return []
        item.is_announced, item.call_id = True, fields.get("call_id")
        self._current.clear()
        call_id, namespace = wire.read_name(item.call_id), wire.read_name(fields.get("namespace"))
        call: Delta
        if item.kind == "function_call":
            call = deltas.ToolCall(item.key, "", name, call_id, namespace, has_end=True)
        else:
            call = deltas.CustomToolCall(item.key, "", name, call_id, namespace)
        return [call, *item.take_held_events()]

    def complete_call(self, fields: dict[str, Any]) -> list[Delta]:
        item = self._item
        if item.kind == "function_call":
            rest = item.add_missing_text("call", 0, wire.read_text(fields.get("arguments")))
            return [deltas.ToolCall(item.key, rest)] if rest else []
        rest = item.add_missing_text("call", 0, wire.read_text(fields.get("input")))
        return [deltas.CustomToolCall(item.key, rest)] if rest else []
