"""Which item an event is about. Servers name items by id and by index, and some of them get either wrong."""

from collections.abc import Iterator
from typing import Any, Literal

from antiphon.backends.responses.wire import Event
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

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
