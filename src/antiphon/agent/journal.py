"""What a run has done so far, as a list of entries; everything else about the run follows from them.

A live run and one that is resumed build the same state from the same entries, so there is no second way for a run to
come to be where it is. With a ledger each entry is on disk before anything is done that depends on it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol.response import Usage
from antiphon.tools.base import Call

JsonObject = dict[str, Any]


class _Entry(Struct, tag_field="entry", frozen=True):
    pass


class Began(_Entry, frozen=True):
    """The run's input, and who is to work on it."""

    agent: str
    input: list[JsonObject]
    at: float


class Answered(_Entry, frozen=True):
    """A turn of the model. `told` is what it was told for it in addition: a nudge, or why its answer was not taken.

    `last` is why this turn was the run's last one, without tools; empty for all others.
    """

    response_id: str
    output: list[JsonObject]
    usage: Usage
    told: list[JsonObject] = []
    last: str = ""


class Intended(_Entry, frozen=True):
    """A call is about to be made."""

    call_id: str


class Resulted(_Entry, frozen=True):
    """What a call came to."""

    call_id: str
    output: str | list[JsonObject]
    is_error: bool = False


class Judged(_Entry, frozen=True):
    """Somebody has said whether a call may be made. `reason` is for the model, if it may not."""

    call_id: str
    approved: bool
    reason: str = ""


class Ended(_Entry, frozen=True):
    """The run is over, and how."""

    kind: str


Entry = Began | Answered | Intended | Resulted | Judged | Ended

_decoder = msgspec.json.Decoder(Entry)
_states = msgspec.json.Decoder(tuple[str, list[Entry]])


class State:
    """Where a run is. `open` are the calls of the last turn that have no result yet, in order."""

    def __init__(self) -> None:
        self.agent = ""
        self.began_at = 0.0
        self.history: list[JsonObject] = []
        self.response_id: str | None = None
        self.sent = 0  # how much of the history the response of that id has seen
        self.turns = 0
        self.tool_calls = 0
        self.usage = Usage(0, 0, 0)
        self.text = ""
        self.last = ""
        self.calls: list[Call] = []
        self.open: list[Call] = []
        self.intended: set[str] = set()
        self.judged: dict[str, Judged] = {}
        self.made: list[Call] = []
        self.ended: str | None = None

    def apply(self, entry: Entry) -> None:
        match entry:
            case Began():
                self.agent, self.began_at = entry.agent, entry.at
                self.history += entry.input
            case Answered():
                self._answer(entry)
            case Intended():
                self.intended.add(entry.call_id)
            case Judged():
                self.judged[entry.call_id] = entry
                self.ended = None
            case Resulted():
                self._settle(entry)
            case Ended():
                self.ended = entry.kind

    def _answer(self, entry: Answered) -> None:
        self.turns += 1
        self.last = entry.last
        self.history += [*entry.told, *entry.output]
        self.response_id = entry.response_id or None
        self.sent = len(self.history)
        self.usage = add_usage(self.usage, entry.usage)
        self.text = text_of(entry.output)
        self.calls = calls_of(entry.output)
        self.open = list(self.calls)
        self.intended, self.judged = set(), {}

    def _settle(self, entry: Resulted) -> None:
        call = next(call for call in self.open if call.call_id == entry.call_id)
        self.open.remove(call)
        self.made.append(call)
        self.tool_calls += 1
        output = {"type": "function_call_output", "call_id": entry.call_id, "output": entry.output}
        self.history.insert(self._place(call), output)

    def _place(self, call: Call) -> int:
        """Outputs stand in the order of their calls, whichever came first."""
        position = self.calls.index(call)
        later = {each.call_id for each in self.calls[position + 1 :]}
        for index in range(self.sent, len(self.history)):
            if self.history[index].get("call_id") in later:
                return index
        return len(self.history)


class Journal:
    """Writes entries, and keeps the state that they amount to."""

    def __init__(self, run_id: str, *, ledger: Ledger | None = None, entries: Sequence[Entry] = ()) -> None:
        self.run_id = run_id
        self.state = State()
        self._ledger = ledger
        self._entries: list[Entry] = []
        for entry in entries:
            self._entries.append(entry)
            self.state.apply(entry)

    async def write(self, entry: Entry) -> None:
        """Write an entry down. Raises EntryTaken if another process has gone on with the run."""
        if self._ledger is not None:
            await self._ledger.append(
                self.run_id,
                len(self._entries),
                msgspec.json.encode(entry),
                status=_status(entry),
                title=_title(entry),
            )
        self._entries.append(entry)
        self.state.apply(entry)

    def pack(self) -> bytes:
        """The whole run, to go on with it elsewhere."""
        return msgspec.json.encode((self.run_id, self._entries))


def unpack(packed: bytes, *, ledger: Ledger | None = None) -> Journal:
    """A run out of what `pack` gave."""
    try:
        run_id, entries = _states.decode(packed)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"This is not the state of a run: {error}.", code="invalid_state") from None
    return Journal(run_id, ledger=ledger, entries=entries)


async def load(run_id: str, ledger: Ledger) -> Journal:
    """A run out of a ledger. Raises InvalidRequest if there is none of this id."""
    entries = [_decoder.decode(entry) for entry in await ledger.read(run_id)]
    if not entries:
        raise InvalidRequest(f"There is no run with id '{run_id}'.", param="run_id", code="run_not_found")
    return Journal(run_id, ledger=ledger, entries=entries)


def _status(entry: Entry) -> str | None:
    if isinstance(entry, Ended):
        return entry.kind
    return "running" if isinstance(entry, Began | Judged) else None


def _title(entry: Entry) -> str:
    return text_of(entry.input)[:200] if isinstance(entry, Began) else ""


def text_of(items: Sequence[JsonObject]) -> str:
    """The text of the messages among these items."""
    texts: list[str] = []
    for item in items:
        content = item.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif item.get("type", "message") == "message":
            texts += [part["text"] for part in content or () if part.get("type") in ("output_text", "input_text")]
    return "".join(texts)


def calls_of(items: Sequence[JsonObject]) -> list[Call]:
    return [
        Call(str(item["call_id"]), str(item["name"]), _as_text(item.get("arguments", "")))
        for item in items
        if item.get("type") == "function_call"
    ]


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def add_usage(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.input_tokens + other.input_tokens,
        one.output_tokens + other.output_tokens,
        one.total_tokens + other.total_tokens,
        type(one.input_tokens_details)(
            one.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens
        ),
        type(one.output_tokens_details)(
            one.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        ),
    )
