"""Continue an interrupted stream with a second run of the model.

`decompose_events` restores the deltas behind the events that were already sent. Composing them puts the composer into
the state before the interruption. A `ReplayFilter` then compares the deltas of the second run with them and returns
only the new ones. If the second run differs, it raises `Diverged` and the stream cannot continue.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import get_call_id, replace_ids

_ITEM_TYPES = (deltas.WholeItem, deltas.OpenItem, deltas.CloseItem)
_ID_FIELDS = ("id", "call_id")


class Diverged(Exception):
    """The second run differs from the events that were already sent."""


class ReplayFilter:
    """A filter that removes from a second run's deltas the part that the first run already produced."""

    def __init__(self, replayed: Iterable[Delta]) -> None:
        """Expect the deltas of the first run, `replayed`, at the start of the second one."""
        self._expected: list[_TextPiece | Delta] = []
        first_run = _Normalizer()
        self._first_call_ids: list[str | None] = []
        for delta in replayed:
            if first_run.starts_call(delta):
                self._first_call_ids.append(_get_call_id(delta))
            self._expect(first_run.normalize(delta))
        self._first_keys = first_run.keys
        self._call_ids: dict[str | None, str | None] = {}  # the second run's call ids, mapped to the first run's
        self._started_calls = 0
        self._second_run = _Normalizer()
        self._unnamed_calls: dict[int | str, deltas.ToolCall | deltas.CustomToolCall] = {}
        self._next = 0  # index in `_expected`
        self._matched = 0  # characters of the expected piece that have been matched

    def feed(self, batch: Iterable[Delta]) -> list[Delta]:
        """Return the new deltas of this batch of the second run. Raise Diverged if it differs from the first run."""
        return [new for delta in batch for new in self._feed(delta)]

    def _expect(self, pieces: "Sequence[_TextPiece | Delta]") -> None:
        for piece in pieces:
            last = self._expected[-1] if self._expected else None
            if isinstance(piece, _TextPiece) and isinstance(last, _TextPiece) and piece.target == last.target:
                self._expected[-1] = _TextPiece(last.target, last.text + piece.text)
            else:
                self._expected.append(piece)

    def _feed(self, delta: Delta) -> Sequence[Delta]:
        if isinstance(delta, deltas.Served | deltas.TokenUsage | deltas.ToolUsage | deltas.Failure):
            return [delta]
        if isinstance(delta, deltas.Finish):
            return self._finish(delta)
        if isinstance(delta, deltas.ToolCall | deltas.CustomToolCall) and not self._second_run.is_open(delta.key):
            delta = self._add_held_fragments(delta)
            if not delta.name:
                return []
        if self._second_run.starts_call(delta):
            self._pair_call(_get_call_id(delta))
        pieces = self._second_run.normalize(delta)
        delta = self._restore_call_id(self._restore_key(delta))
        if self._next == len(self._expected):
            return [delta]
        rest = ""
        for piece in pieces:
            if self._next == len(self._expected):
                return [_replace_text(delta, _get_text(delta))]
            rest = self._match(piece)
        return [_replace_text(delta, rest)] if rest else []

    def _add_held_fragments(
        self, delta: deltas.ToolCall | deltas.CustomToolCall
    ) -> deltas.ToolCall | deltas.CustomToolCall:
        """Hold the fragments of a call until its name arrives, then return them as one delta."""
        held = self._unnamed_calls.pop(delta.key, None)
        if held is not None:
            field = "arguments" if isinstance(delta, deltas.ToolCall) else "input"
            joined = {field: _get_text(held) + _get_text(delta), "call_id": held.call_id or delta.call_id}
            delta = msgspec.structs.replace(delta, **joined)
        if not delta.name:
            self._unnamed_calls[delta.key] = delta
        return delta

    def _restore_key(self, delta: Delta) -> Delta:
        """Replace the key of a call with the first run's. A new call gets a key that no other call has."""
        if not isinstance(delta, deltas.KEYED_TYPES) or delta.key not in self._second_run.calls:
            return delta
        index = self._second_run.calls[delta.key]
        key = self._first_keys[index] if index < len(self._first_keys) else f"new {index}"
        return msgspec.structs.replace(delta, key=key)

    def _pair_call(self, call_id: str | None) -> None:
        """Map the id of the second run's next call to the id of the first run's call at the same position."""
        if self._started_calls < len(self._first_call_ids):
            self._call_ids[call_id] = self._first_call_ids[self._started_calls]
        else:
            self._call_ids.pop(call_id, None)
        self._started_calls += 1

    def _restore_call_id(self, delta: Delta) -> Delta:
        """Replace the call id of a tool output with the first run's id of that call."""
        if not isinstance(delta, _ITEM_TYPES) or delta.item is None or not delta.item.type.endswith("_output"):
            return delta
        call_id = self._call_ids.get(_get_call_id(delta))
        return delta if call_id is None else msgspec.structs.replace(delta, item=replace_ids(delta.item, None, call_id))

    def _finish(self, finish: deltas.Finish) -> Sequence[Delta]:
        # If the last expected text was matched in full, nothing is missing.
        if self._next < len(self._expected) - 1 or self._matched < self._count_unmatched():
            raise Diverged("the second run ended earlier than the first")
        return [*self._unnamed_calls.values(), finish]

    def _count_unmatched(self) -> int:
        last = self._expected[self._next] if self._next < len(self._expected) else None
        return len(last.text) if isinstance(last, _TextPiece) else int(last is not None)

    def _match(self, piece: "_TextPiece | Delta") -> str:
        """Compare a piece with the next expected one. Return its text beyond the end of everything expected."""
        expected = self._expected[self._next]
        if _is_blank_argument(piece) and (not isinstance(expected, _TextPiece) or piece.target != expected.target):
            return ""  # the call was closed in the first run, and the composer ignored it
        if not isinstance(piece, _TextPiece) or not isinstance(expected, _TextPiece):
            if piece != expected:
                raise Diverged("the second run has a different item")
            self._next += 1
            return ""
        if piece.target != expected.target:
            raise Diverged("the second run has text in a different item or part")
        unmatched = expected.text[self._matched :]
        if unmatched.startswith(piece.text):
            self._advance(len(piece.text), expected)
            return ""
        is_last = self._next == len(self._expected) - 1
        if not is_last or not piece.text.startswith(unmatched):
            raise Diverged("the second run has different text")
        self._advance(len(unmatched), expected)
        return piece.text[len(unmatched) :]

    def _advance(self, characters: int, expected: "_TextPiece") -> None:
        self._matched += characters
        if self._matched == len(expected.text):
            self._next, self._matched = self._next + 1, 0


class _TextPiece(NamedTuple):
    """Text of one target: a content part, a summary part, or the arguments of a call."""

    target: tuple[object, ...]
    text: str


def _is_blank_argument(piece: "_TextPiece | Delta") -> "TypeGuard[_TextPiece]":
    return isinstance(piece, _TextPiece) and piece.target[0] is deltas.ToolCall and not piece.text.strip()


class _Normalizer:
    """Converts the deltas of a run to pieces that can be compared with those of another run.

    Keys of calls and indexes of summaries differ between runs, so they are replaced by their order. Adjacent text of
    one kind has one target, however it was split into deltas.
    """

    def __init__(self) -> None:
        self.calls: dict[int | str, int] = {}  # the position of the call or item that last had this key
        self.keys: list[int | str] = []  # the keys in the order of their calls and items
        self._closed: set[int | str] = set()
        self._summaries = 0
        self._summary_index: int | None = None
        self._texts = 0
        self._text_type: type | None = None

    def starts_call(self, delta: Delta) -> bool:
        """Return True if this is the first delta of a call."""
        match delta:
            case deltas.ToolCall() | deltas.CustomToolCall():
                return not self.is_open(delta.key)
            case deltas.WholeItem() | deltas.OpenItem():
                return get_call_id(delta.item) is not None and not delta.item.type.endswith("_output")
        return False

    def is_open(self, key: int | str) -> bool:
        """Return True if a call with this key has started and was not closed. A key may be used again after that."""
        return key in self.calls and key not in self._closed

    def _open(self, key: int | str) -> int:
        """Return the position of a new call or item with this key."""
        self.calls[key] = len(self.keys)
        self.keys.append(key)
        self._closed.discard(key)
        return self.calls[key]

    def normalize(self, delta: Delta) -> "Sequence[_TextPiece | Delta]":
        match delta:
            case deltas.Text() | deltas.Refusal() | deltas.Reasoning():
                return self._normalize_text(delta)
            case deltas.ReasoningSummary() | deltas.ReasoningSeal():
                return self._normalize_reasoning(delta)
            case deltas.ToolCall() | deltas.CustomToolCall():
                return self._normalize_call(delta)
            case deltas.OpenItem() | deltas.CloseItem() | deltas.WholeItem():
                return self._normalize_item(delta)
            case deltas.Passthrough() | deltas.ItemPassthrough():
                # Ids and sequence numbers differ in each run: compare the type only.
                return [deltas.Passthrough(Unknown(delta.event.type.encode()))]
            case deltas.Phase() | deltas.NoStatus() | deltas.Amend():
                return []
            case deltas.NewPart():
                self._text_type = None
                return []
            case deltas.Annotate():
                self._start_text(deltas.Text)
        return [delta]

    def _normalize_item(
        self, delta: deltas.OpenItem | deltas.CloseItem | deltas.WholeItem
    ) -> "Sequence[_TextPiece | Delta]":
        """Return the delta with its item's ids removed, because they differ in each run."""
        if isinstance(delta, deltas.CloseItem) and delta.key is not None:
            known = delta.item is not None and delta.key in self.calls
            self._closed.add(delta.key)
            return [deltas.CloseItem(self.calls[delta.key], _remove_ids(delta.item))] if known else []
        self._end_text()
        if isinstance(delta, deltas.CloseItem):
            return []
        if isinstance(delta, deltas.OpenItem):
            return [deltas.OpenItem(self._open(delta.key), _remove_ids(delta.item))]
        return [deltas.WholeItem(_remove_ids(delta.item))]

    def _end_text(self) -> None:
        self._text_type = self._summary_index = None

    def _start_text(self, text_type: type) -> None:
        if text_type is not deltas.Reasoning:
            self._summary_index = None
        if self._text_type is not text_type:
            self._text_type, self._texts = text_type, self._texts + 1

    def _normalize_text(self, delta: deltas.Text | deltas.Refusal | deltas.Reasoning) -> "Sequence[_TextPiece | Delta]":
        if not delta.text:
            return []
        self._start_text(type(delta))
        return [_TextPiece((type(delta), self._texts), delta.text)]

    def _normalize_reasoning(
        self, delta: deltas.ReasoningSummary | deltas.ReasoningSeal
    ) -> "Sequence[_TextPiece | Delta]":
        if self._text_type is not deltas.Reasoning:
            self._text_type = None
        if isinstance(delta, deltas.ReasoningSummary):
            return self._normalize_summary(delta)
        if not delta.encrypted_content:
            return []
        self._end_text()
        return [delta]

    def _normalize_summary(self, delta: deltas.ReasoningSummary) -> "Sequence[_TextPiece | Delta]":
        pieces: list[_TextPiece | Delta] = []
        if delta.index != self._summary_index:
            self._summary_index = delta.index
            self._summaries += 1
            pieces.append(deltas.ReasoningSummary("", self._summaries))  # a part exists even without text
        if delta.text:
            pieces.append(_TextPiece((type(delta), self._summaries), delta.text))
        return pieces

    def _normalize_call(self, delta: deltas.ToolCall | deltas.CustomToolCall) -> "Sequence[_TextPiece | Delta]":
        pieces: list[_TextPiece | Delta] = []
        if not self.is_open(delta.key):
            self._end_text()
            pieces.append(type(delta)(self._open(delta.key), "", delta.name, None, delta.namespace))
        text = _get_text(delta)
        if text:
            pieces.append(_TextPiece((type(delta), self.calls[delta.key]), text))
        return pieces


def _get_call_id(delta: Delta) -> str | None:
    if isinstance(delta, deltas.ToolCall | deltas.CustomToolCall):
        return delta.call_id
    return get_call_id(delta.item) if isinstance(delta, _ITEM_TYPES) and delta.item is not None else None


def _remove_ids(item: Any) -> Any:
    if isinstance(item, Unknown):
        fields = msgspec.json.decode(item.raw, type=dict[str, msgspec.Raw])
        return Unknown(msgspec.json.encode({name: fields[name] for name in sorted(fields) if name not in _ID_FIELDS}))
    return msgspec.structs.replace(item, **{name: None for name in _ID_FIELDS if name in item.__struct_fields__})


def _get_text(delta: Delta) -> str:
    match delta:
        case deltas.ToolCall():
            return delta.arguments
        case deltas.CustomToolCall():
            return delta.input
        case _:
            return getattr(delta, "text", "")


def _replace_text(delta: Delta, text: str) -> Delta:
    """Return the delta with only this end of its text."""
    match delta:
        case deltas.Text():
            # Log probabilities cannot be cut with the text: only an uncut delta keeps them.
            return deltas.Text(text, delta.logprobs if text == delta.text else ())
        case deltas.Refusal() | deltas.Reasoning():
            return type(delta)(text)
        case deltas.ReasoningSummary():
            return deltas.ReasoningSummary(text, delta.index)
        case deltas.ToolCall():
            return deltas.ToolCall(delta.key, text, delta.name, delta.call_id, delta.namespace)
        case deltas.CustomToolCall():
            return deltas.CustomToolCall(delta.key, text, delta.name, delta.call_id, delta.namespace)
        case _:
            return delta
