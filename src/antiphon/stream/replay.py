"""Continue an interrupted stream with a second run of the model.

`decompose_events` restores the deltas behind the events that were already sent. Composing them puts the composer into
the state before the interruption. A `ReplayFilter` then compares the deltas of the second run with them and returns
only the new ones. If the second run differs, it raises `Diverged` and the stream cannot continue.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.stream.passthrough import get_call_id, replace_ids


class Diverged(Exception):
    """The second run does not say what the first one said."""


class _Spoken(NamedTuple):
    """Words in one place: a message, a summary's part, a call's arguments."""

    place: tuple[object, ...]
    text: str


class ReplayFilter:
    """Takes the deltas of a second run and gives those that the first run had not told."""

    def __init__(self, told: Iterable[Delta]) -> None:
        self._expected: list[_Spoken | Delta] = []
        names = _Names()
        self._told_ids: list[str | None] = []
        for delta in told:
            if names.begins_call(delta):
                self._told_ids.append(_find_call_id(delta))
            self._expect(names.read(delta))
        self._told_calls = list(names.calls)
        self._ids: dict[str | None, str | None] = {}
        self._begun = 0
        self._names = _Names()
        self._unnamed: dict[int | str, deltas.ToolCall | deltas.CustomToolCall] = {}
        self._next = 0
        self._heard = 0

    def feed(self, batch: Iterable[Delta]) -> list[Delta]:
        return [new for delta in batch for new in self._feed(delta)]

    def _expect(self, pieces: "Sequence[_Spoken | Delta]") -> None:
        for piece in pieces:
            last = self._expected[-1] if self._expected else None
            if isinstance(piece, _Spoken) and isinstance(last, _Spoken) and piece.place == last.place:
                self._expected[-1] = _Spoken(last.place, last.text + piece.text)
            else:
                self._expected.append(piece)

    def _feed(self, delta: Delta) -> Sequence[Delta]:
        if isinstance(delta, deltas.Served | deltas.TokenUsage | deltas.Failure):
            return [delta]
        if isinstance(delta, deltas.Finish):
            return self._end(delta)
        if isinstance(delta, deltas.ToolCall | deltas.CustomToolCall) and delta.key not in self._names.calls:
            delta = self._gather(delta)
            if not delta.name:
                return []
        if self._names.begins_call(delta):
            self._pair(_find_call_id(delta))
        pieces = self._names.read(delta)
        delta = self._answer(self._rename(delta))
        if self._next == len(self._expected):
            return [delta]
        unheard = ""
        for piece in pieces:
            if self._next == len(self._expected):
                return [_shorten(delta, _words(delta))]
            unheard = self._match(piece)
        return [_shorten(delta, unheard)] if unheard else []

    def _gather(self, delta: deltas.ToolCall | deltas.CustomToolCall) -> deltas.ToolCall | deltas.CustomToolCall:
        """A call is told when it has its name: until then, what came of it waits."""
        waiting = self._unnamed.pop(delta.key, None)
        if waiting is not None:
            field = "arguments" if isinstance(delta, deltas.ToolCall) else "input"
            whole = {field: _words(waiting) + _words(delta), "call_id": waiting.call_id or delta.call_id}
            delta = msgspec.structs.replace(delta, **whole)
        if not delta.name:
            self._unnamed[delta.key] = delta
        return delta

    def _rename(self, delta: Delta) -> Delta:
        """A call goes on under the key it was told by; a new one must not take that of another."""
        if not isinstance(delta, _KEYED) or delta.key not in self._names.calls:
            return delta
        which = self._names.calls[delta.key]
        key = self._told_calls[which] if which < len(self._told_calls) else f"new {which}"
        return msgspec.structs.replace(delta, key=key)

    def _pair(self, call_id: str | None) -> None:
        """The second run has come to its next call. What it calls it there is another name for what was told."""
        if self._begun < len(self._told_ids):
            self._ids[call_id] = self._told_ids[self._begun]
        else:
            self._ids.pop(call_id, None)
        self._begun += 1

    def _answer(self, delta: Delta) -> Delta:
        """An output goes to the call as it was told."""
        if not isinstance(delta, _ITEMS) or delta.item is None or not delta.item.type.endswith("_output"):
            return delta
        call_id = self._ids.get(_find_call_id(delta))
        return delta if call_id is None else msgspec.structs.replace(delta, item=replace_ids(delta.item, None, call_id))

    def _end(self, finish: deltas.Finish) -> Sequence[Delta]:
        # The last words may have been told in full: then nothing is left to hear of them.
        if self._next < len(self._expected) - 1 or self._heard < self._left():
            raise Diverged("the second run ended earlier")
        return [*self._unnamed.values(), finish]

    def _left(self) -> int:
        last = self._expected[self._next] if self._next < len(self._expected) else None
        return len(last.text) if isinstance(last, _Spoken) else int(last is not None)

    def _match(self, piece: "_Spoken | Delta") -> str:
        """Check one piece against what comes next. Returns the end of it that goes beyond everything expected."""
        expected = self._expected[self._next]
        if not isinstance(piece, _Spoken) or not isinstance(expected, _Spoken):
            if piece != expected:
                raise Diverged("the second run does something else")
            self._next += 1
            return ""
        if piece.place != expected.place:
            raise Diverged("the second run speaks in another place")
        rest = expected.text[self._heard :]
        if rest.startswith(piece.text):
            self._hear(len(piece.text), of=expected)
            return ""
        last = self._next == len(self._expected) - 1
        if not last or not piece.text.startswith(rest):
            raise Diverged("the second run says something else")
        self._hear(len(rest), of=expected)
        return piece.text[len(rest) :]

    def _hear(self, characters: int, *, of: _Spoken) -> None:
        self._heard += characters
        if self._heard == len(of.text):
            self._next, self._heard = self._next + 1, 0


_KEYED = (
    deltas.ToolCall,
    deltas.CustomToolCall,
    deltas.Amend,
    deltas.OpenItem,
    deltas.ItemEvent,
    deltas.CloseItem,
)


_ITEMS = (deltas.WholeItem, deltas.OpenItem, deltas.CloseItem)


def _find_call_id(delta: Delta) -> str | None:
    if isinstance(delta, deltas.ToolCall | deltas.CustomToolCall):
        return delta.call_id
    return get_call_id(delta.item) if isinstance(delta, _ITEMS) and delta.item is not None else None


class _Names:
    """Reads deltas as pieces to compare. Runs number calls and summaries as they like: what counts is which it is.

    Words of one kind that nothing parts are one stretch, whatever they were cut into.
    """

    def __init__(self) -> None:
        self.calls: dict[int | str, int] = {}
        self._summaries = 0
        self._summary: int | None = None
        self._stretches = 0
        self._stretch: type | None = None

    def begins_call(self, delta: Delta) -> bool:
        """Whether this is the first that is said of a call."""
        match delta:
            case deltas.ToolCall() | deltas.CustomToolCall():
                return delta.key not in self.calls
            case deltas.WholeItem() | deltas.OpenItem():
                return get_call_id(delta.item) is not None and not delta.item.type.endswith("_output")
        return False

    def read(self, delta: Delta) -> "Sequence[_Spoken | Delta]":
        match delta:
            case deltas.Text() | deltas.Refusal() | deltas.Reasoning():
                return self._read_words(delta)
            case deltas.ReasoningSummary() | deltas.ReasoningSeal():
                return self._read_reasoning(delta)
            case deltas.ToolCall() | deltas.CustomToolCall():
                return self._read_call(delta)
            case deltas.OpenItem() | deltas.CloseItem() | deltas.WholeItem():
                return self._read_item(delta)
            case deltas.Passthrough() | deltas.ItemEvent():
                # Ids and numbers are others in each run.
                return [deltas.Passthrough(Unknown(delta.event.type.encode()))]
            case deltas.Phase() | deltas.Amend():
                return []
            case deltas.NewPart():
                self._stretch = None
                return []
            case deltas.Annotate():
                self._begin(deltas.Text)
        return [delta]

    def _read_item(self, delta: deltas.OpenItem | deltas.CloseItem | deltas.WholeItem) -> "Sequence[_Spoken | Delta]":
        """Ids may be of our making, and a model calls by another id each time."""
        if isinstance(delta, deltas.CloseItem) and delta.key is not None:
            known = delta.item is not None and delta.key in self.calls
            return [deltas.CloseItem(self.calls[delta.key], _blank(delta.item))] if known else []
        self._part()
        if isinstance(delta, deltas.CloseItem):
            return []
        if isinstance(delta, deltas.OpenItem):
            self.calls[delta.key] = len(self.calls)
            return [deltas.OpenItem(self.calls[delta.key], _blank(delta.item))]
        return [deltas.WholeItem(_blank(delta.item))]

    def _part(self) -> None:
        """What was being said is over."""
        self._stretch = self._summary = None

    def _begin(self, kind: type) -> None:
        if kind is not deltas.Reasoning:
            self._summary = None
        if self._stretch is not kind:
            self._stretch, self._stretches = kind, self._stretches + 1

    def _read_words(self, delta: deltas.Text | deltas.Refusal | deltas.Reasoning) -> "Sequence[_Spoken | Delta]":
        if not delta.text:
            return []
        self._begin(type(delta))
        return [_Spoken((type(delta), self._stretches), delta.text)]

    def _read_reasoning(self, delta: deltas.ReasoningSummary | deltas.ReasoningSeal) -> "Sequence[_Spoken | Delta]":
        if self._stretch is not deltas.Reasoning:
            self._stretch = None
        if isinstance(delta, deltas.ReasoningSummary):
            return self._read_summary(delta)
        if not delta.encrypted_content:
            return []
        self._part()
        return [delta]

    def _read_summary(self, delta: deltas.ReasoningSummary) -> "Sequence[_Spoken | Delta]":
        if delta.index != self._summary:
            self._summary = delta.index
            self._summaries += 1
        return [_Spoken((type(delta), self._summaries), delta.text)] if delta.text else []

    def _read_call(self, delta: deltas.ToolCall | deltas.CustomToolCall) -> "Sequence[_Spoken | Delta]":
        pieces: list[_Spoken | Delta] = []
        if delta.key not in self.calls:
            self._part()
            self.calls[delta.key] = len(self.calls)
            pieces.append(type(delta)(self.calls[delta.key], "", delta.name, None, delta.namespace))
        words = _words(delta)
        if words:
            pieces.append(_Spoken((type(delta), self.calls[delta.key]), words))
        return pieces


def _blank(item: Any) -> Any:
    """The item without its ids."""
    if isinstance(item, Unknown):
        fields = msgspec.json.decode(item.raw, type=dict[str, msgspec.Raw])
        return Unknown(msgspec.json.encode({name: fields[name] for name in sorted(fields) if name not in _IDS}))
    return msgspec.structs.replace(item, **{name: None for name in _IDS if name in item.__struct_fields__})


_IDS = ("id", "call_id")


def _words(delta: Delta) -> str:
    match delta:
        case deltas.ToolCall():
            return delta.arguments
        case deltas.CustomToolCall():
            return delta.input
        case _:
            return getattr(delta, "text", "")


def _shorten(delta: Delta, text: str) -> Delta:
    """The same delta with only the end of its text."""
    match delta:
        case deltas.Text():
            # Token probabilities cannot be cut with the text: they stay with a whole delta, or go.
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
