"""An item as a whole, against what was said of it: the rest is said, and what words cannot say is added as fields."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from antiphon.backends.responses import wire
from antiphon.backends.responses.tracking import Track, Voice
from antiphon.backends.upstream.logprobs import read_logprobs
from antiphon.protocol.items import Message, Reasoning
from antiphon.protocol.open import Unknown
from antiphon.stream import deltas
from antiphon.stream.carried import keep_item
from antiphon.stream.deltas import Delta

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
            return [deltas.CloseItem(track.key, keep_item(bytes(raw)))]
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
        item = keep_item(bytes(raw))
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
            logprobs = read_logprobs(part.get("logprobs")) if rest == whole else ()
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
