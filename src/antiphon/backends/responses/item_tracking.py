"""Which item an event is about. Servers name items by id and by index, and some of them get either wrong."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from antiphon.backends.responses import wire
from antiphon.backends.responses.wire import Event
from antiphon.protocol.items import Message, Reasoning
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import decode_output_item
from antiphon.upstream.fields import parse_logprobs

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call", "carried"]
_KINDS: dict[str, Kind] = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
}


def find_kind(item_type: Any) -> Kind:
    """How items of this type are told: `carried` are all those that we do not write ourselves."""
    return _KINDS.get(item_type, "carried") if isinstance(item_type, str) else "carried"


class Track:
    """One item of the answer, and what was said of it so far."""

    def __init__(self, key: int, kind: Kind) -> None:
        self.key = key
        self.kind = kind
        self.type: Any = None if kind == "carried" else kind
        self.call_id: Any = None
        self.phase: Any = None
        self.part: int | None = None
        self.named = False
        self.closed = False
        self.annotations: dict[int, int] = {}
        self._said: dict[tuple[str, int], list[str]] = {}

    @property
    def silent(self) -> bool:
        """Whether nothing was said of it at all."""
        return not self._said and not self.annotations

    def say(self, what: str, index: int, text: str) -> str:
        self._said.setdefault((what, index), []).append(text)
        return text

    def complete(self, what: str, index: int, whole: str) -> str:
        """The end of a text that is known as a whole now, if some of it was not said: servers leave out deltas."""
        said = "".join(self._said.get((what, index), ()))
        rest = whole[len(said) :] if whole.startswith(said) else ""
        return self.say(what, index, rest) if rest else ""


class Voice:
    """Which item is being said, as far as the composer knows: anything else that begins ends it."""

    def __init__(self) -> None:
        self.speaker: Track | None = None

    def take(self, track: Track, part: int | None = None) -> list[Delta]:
        """What has to be told before more is said of this item, in this part of it."""
        told: list[Delta] = []
        if self.speaker is not track:
            if self.speaker is not None and self.speaker.kind == track.kind:
                told.append(deltas.CloseItem())
            if track.kind == "message" and track.phase in ("commentary", "final_answer"):
                told.append(deltas.Phase(track.phase))
            self.speaker = track
        elif part is not None and track.part is not None and part != track.part:
            told.append(deltas.NewPart())
        if part is not None:
            track.part = part
        return told

    def fall_silent(self) -> None:
        self.speaker = None


class Tracks:
    """All items of an answer."""

    def __init__(self) -> None:
        self._all: list[Track] = []
        self._by_id: dict[str, Track] = {}
        self._by_index: dict[int, Track] = {}

    def __iter__(self) -> Iterator[Track]:
        return iter(self._all)

    def begin(self, kind: Kind, item_id: Any, output_index: Any) -> Track:
        track = Track(len(self._all), kind)
        self._all.append(track)
        if isinstance(item_id, str) and item_id:
            self._by_id[item_id] = track
        if isinstance(output_index, int):
            self._by_index[output_index] = track
        return track

    def find(self, item_id: Any, output_index: Any, kind: Kind | None = None) -> Track | None:
        """The item by its id, else by its index, else, if there is no index, the last one under way."""
        by_id = self._by_id.get(item_id) if isinstance(item_id, str) else None
        if by_id is not None and _fits(by_id, kind):
            return by_id
        if isinstance(output_index, int):
            by_index = self._by_index.get(output_index)
            return by_index if by_index is not None and _fits(by_index, kind) else None
        if kind is None:
            return None
        return next((track for track in reversed(self._all) if track.kind == kind and not track.closed), None)

    def follow(self, event: Event, kind: Kind) -> Track:
        """The item that more is said of. One that was never announced begins here."""
        track = self.find(event.item_id, event.output_index, kind)
        if track is None or self.is_over(track, event.item_id):
            return self.begin(kind, event.item_id, event.output_index)
        return track

    def is_over(self, track: Track, item_id: Any) -> bool:
        """Whether this was found by an index that another item has by now."""
        return track.closed and not (isinstance(item_id, str) and item_id in self._by_id)

    def match(self, items: list[dict[str, Any]]) -> list[Track | None]:
        """For each item of a final list, the one it was told as: by id, by call, else the next of its type."""
        matched = [self._by_id.get(item["id"]) if isinstance(item.get("id"), str) else None for item in items]
        known = {id(track) for track in matched if track is not None}
        left = [track for track in self._all if id(track) not in known]
        # None is taken for two: servers give two calls the same id.
        for find in (_find_call, _find_next):
            for place, item in enumerate(items):
                track = find(left, item) if matched[place] is None else None
                if track is not None:
                    left.remove(track)
                    matched[place] = track
        return matched


def _find_call(tracks: list[Track], item: dict[str, Any]) -> Track | None:
    if item.get("call_id") is None:
        return None
    call = (item.get("type"), item["call_id"])
    return next((track for track in tracks if (track.type, track.call_id) == call), None)


def _find_next(tracks: list[Track], item: dict[str, Any]) -> Track | None:
    track = next((track for track in tracks if track.type in (item.get("type"), None)), None)
    return track if track is not None and track.kind == find_kind(item.get("type")) else None


def _fits(track: Track, kind: Kind | None) -> bool:
    return kind is None or track.kind == kind


# What our own form of each kind of item says.
_TOLD = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments", "namespace"}),
    "custom_tool_call": frozenset({"type", "id", "status", "call_id", "name", "input", "namespace"}),
}
_PARTS = {"message": ("output_text", "refusal"), "reasoning": ("reasoning_text",)}
_PREFIXES = {"message": "msg", "reasoning": "rs"}


class Closing:
    """Ends one item, or a part of it."""

    def __init__(self, track: Track, voice: Voice) -> None:
        self._track = track
        self._voice = voice

    def close(self, raw: Raw, item: dict[str, Any]) -> Sequence[Delta]:
        track = self._track
        track.closed = True
        if track.kind == "carried":
            return [deltas.CloseItem(track.key, decode_output_item(bytes(raw)))]
        if track.kind in ("function_call", "custom_tool_call"):
            told = self.announce_call(item) + self.complete_call(item)
            return told + self._end(item, track.key)
        return self._close_speech(raw, item)

    def _close_speech(self, raw: Raw, item: dict[str, Any]) -> list[Delta]:
        track = self._track
        told: list[Delta] = []
        for index, part in enumerate(wire.list_objects(item.get("summary"))):
            told += self.complete_summary(index, part.get("text"))
        for index, part in enumerate(wire.list_objects(item.get("content"))):
            told += self.complete_part(index, part)
        sealed = item.get("encrypted_content")
        if track.silent and not sealed:
            return self._give_whole(raw)
        is_over = self._voice.speaker is not track and not track.silent
        if track.kind == "reasoning" and sealed and not is_over:
            told += self._voice.take(track)
            told += [*self._amend(item, None), deltas.ReasoningSeal(wire.read_text(sealed))]
        elif self._voice.speaker is track:  # else it was closed when something else was said
            told += self._end(item, None)
        if self._voice.speaker is track:
            self._voice.fall_silent()
        return told

    def _give_whole(self, raw: Raw) -> list[Delta]:
        """An item that says nothing: there are no words that could bring it about."""
        item = decode_output_item(bytes(raw))
        self._voice.fall_silent()
        if isinstance(item, Message | Reasoning):
            return [deltas.WholeItem(msgspec.structs.replace(item, id=None))]
        assert isinstance(item, Unknown)
        key = self._track.key
        return [deltas.OpenItem(key, item, _PREFIXES[self._track.kind]), deltas.CloseItem(key, item)]

    def _end(self, item: dict[str, Any], key: int | None) -> list[Delta]:
        whole = item.get("status") != "incomplete"
        return [*self._amend(item, key), deltas.CloseItem(key, ending="completed" if whole else "incomplete")]

    def _amend(self, item: dict[str, Any], key: int | None) -> list[Delta]:
        """The fields that nothing which was said stands for."""
        kind = self._track.kind
        more = {name: value for name, value in item.items() if name not in _TOLD[kind] and value is not None}
        if kind in _PARTS and any(
            part.get("type") not in _PARTS[kind] for part in wire.list_objects(item.get("content"))
        ):
            more["content"] = item["content"]
        if kind == "message" and item.get("phase") is not None and item["phase"] != self._track.phase:
            more["phase"] = item["phase"]
        fields = {name: Raw(msgspec.json.encode(value)) for name, value in more.items()}
        return [deltas.Amend(fields, key)] if fields else []

    # Parts

    def complete_part(self, index: int, part: dict[str, Any]) -> list[Delta]:
        track = self._track
        if track.kind == "reasoning":
            rest = track.complete("text", index, wire.read_text(part.get("text")))
            return [*self._voice.take(track, index), deltas.Reasoning(rest)] if rest else []
        if part.get("type") == "refusal":
            rest = track.complete("refusal", index, wire.read_text(part.get("refusal")))
            return [*self._voice.take(track, index), deltas.Refusal(rest)] if rest else []
        if part.get("type") != "output_text":
            return []
        whole = wire.read_text(part.get("text"))
        rest = track.complete("text", index, whole)
        told: list[Delta] = []
        if rest:
            logprobs = parse_logprobs(part.get("logprobs")) if rest == whole else ()
            told += [*self._voice.take(track, index), deltas.Text(rest, logprobs)]
        return told + self._complete_annotations(index, part.get("annotations"))

    def _complete_annotations(self, index: int, annotations: Any) -> list[Delta]:
        track = self._track
        missing = wire.list_objects(annotations)[track.annotations.get(index, 0) :]
        if not missing:
            return []
        track.annotations[index] = track.annotations.get(index, 0) + len(missing)
        return [*self._voice.take(track, index), *(deltas.Annotate(wire.read_annotation(each)) for each in missing)]

    def complete_summary(self, index: int, text: Any) -> list[Delta]:
        rest = self._track.complete("summary", index, wire.read_text(text))
        return [*self._voice.take(self._track), deltas.ReasoningSummary(rest, index)] if rest else []

    # Calls

    def announce_call(self, call: dict[str, Any]) -> list[Delta]:
        """A call begins with its name."""
        track = self._track
        name = call.get("name")
        if track.named or not isinstance(name, str) or not name:
            return []
        track.named, track.call_id = True, call.get("call_id")
        self._voice.fall_silent()
        make = deltas.ToolCall if track.kind == "function_call" else deltas.CustomToolCall
        namespace = call.get("namespace")
        return [make(track.key, "", name, wire.read_name(track.call_id), wire.read_name(namespace))]

    def complete_call(self, call: dict[str, Any]) -> list[Delta]:
        track = self._track
        told: list[Delta] = []
        if track.kind == "function_call":
            rest = track.complete("call", 0, wire.read_text(call.get("arguments")))
            return [deltas.ToolCall(track.key, rest)] if rest else told
        rest = track.complete("call", 0, wire.read_text(call.get("input")))
        return [deltas.CustomToolCall(track.key, rest)] if rest else told
