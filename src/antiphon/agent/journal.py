"""What a run has done so far, as a list of entries; everything else about the run follows from them.

A live run and one that is resumed build the same state from the same entries, so there is no second way for a run to
come to be where it is. With a ledger each entry is on disk before anything is done that depends on it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from antiphon.agent.entries import Answered, Began, Ended, Entry, Intended, Judgement, Paused, Resulted, Resumed, Wasted
from antiphon.agent.history import OUTPUTS, as_call, make_output, unseal
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.protocol.json_text import JsonObject, read_json
from antiphon.protocol.response import Usage
from antiphon.tools.base import ToolInvocation, UsageCost

WARNED_AT = 2
STOPPED_AT = 3

WARNING = "This very call was made before. If the result does not help, do something else or answer with what you have."
STOPPED = "This call was not made again: it has been made twice already. Answer now, with what you have."

Signature = tuple[str, bytes]


def sign(call: ToolInvocation) -> Signature:
    """Two calls are the same if their arguments are, however they are written."""
    try:
        arguments = msgspec.json.encode(read_json(call.arguments or "{}"), order="deterministic")
    except msgspec.DecodeError:
        arguments = call.arguments.encode()
    return call.name, arguments


class State:
    """Where a run is. `calls` are those of the last turn, and `open` the ones that have no result yet, in order."""

    def __init__(self) -> None:
        self.agent = ""
        self.began_at = 0.0
        """When it would have begun, had it been at work ever since."""
        self.history: list[JsonObject] = []
        self.response_id: str | None = None
        self.sent = 0
        """How much of the history the response of that id has seen."""
        self.turns = 0
        self.tool_calls = 0
        self.repairs = 0
        self.usage = Usage(0, 0, 0)
        """What all models took, those asked by tools too."""
        self.unpriced = Usage(0, 0, 0)
        """What of it the prices of this run hold for."""
        self.charged = 0.0
        """What the rest cost."""
        self.text = ""
        self.refusal = ""
        self.cut = ""
        self.last = ""
        self.calls: list[ToolInvocation] = []
        self.open: list[ToolInvocation] = []
        self.intended: set[str] = set()
        self.paused: dict[str, Paused] = {}
        self.judged: dict[str, Judgement] = {}
        self.made: Counter[Signature] = Counter()
        self.decided: ToolInvocation | None = None
        self.limit = ""
        self.ended: Ended | None = None

    def waits_for(self, call_id: str) -> bool:
        """Whether somebody may say something about the call of this id."""
        waiting = {call.call_id for call in self.open}
        waiting |= {call.call_id for paused in self.paused.values() for call in paused.calls}
        return call_id in waiting and call_id not in self.judged

    def check(self, entry: Entry) -> None:
        """Raises ValueError if the entry cannot come here."""
        if isinstance(entry, Intended | Paused | Resulted):
            self._find_open(entry.call_id)

    def apply(self, entry: Entry) -> None:
        """Raises ValueError if the entry cannot come here."""
        match entry:
            case Began():
                self.agent, self.began_at = entry.agent, entry.at
                self.history += entry.input
            case Answered():
                self._answer(entry)
            case Wasted():
                self._spend(UsageCost(entry.usage))
            case Intended():
                self._intend(entry)
            case Paused():
                self._find_open(entry.call_id)
                self.paused[entry.call_id] = entry
                for call in entry.calls:
                    self.judged.pop(call.call_id, None)
            case Resulted():
                self._settle(entry)
            case Ended():
                self.ended = entry
            case _:
                self.judged |= {each.call_id: each for each in entry.judged}
                if self.ended is not None:
                    self.began_at += entry.at - self.ended.at
                self.ended = None

    def _answer(self, entry: Answered) -> None:
        self.turns += 1
        self.repairs += entry.repairs
        self.last, self.cut = entry.last, entry.cut
        if entry.unsealed:
            self.history = unseal(self.history)
        self.history += [*entry.told, *entry.output]
        self.response_id = entry.response_id or None
        self.sent = len(self.history)
        self._spend(UsageCost(entry.usage))
        self.text, self.refusal = text_of(entry.output), text_of(entry.output, kinds=("refusal",))
        self.calls = calls_of(entry.output)
        self.open = list(self.calls)
        self.intended, self.paused, self.judged = set(), {}, {}

    def _intend(self, entry: Intended) -> None:
        self._find_open(entry.call_id)
        self.judged.pop(entry.call_id, None)
        if entry.call_id not in self.intended:
            self.intended.add(entry.call_id)
            self.tool_calls += 1

    def _settle(self, entry: Resulted) -> None:
        call = self._find_open(entry.call_id)
        self.open.remove(call)
        if entry.spent is not None:
            self._spend(entry.spent)
        self.paused.pop(entry.call_id, None)
        self.made[sign(call)] += 1
        if entry.means == "decision":
            self.decided = call
        elif entry.means:
            self.limit = entry.means
        self.history.insert(self._place(call), make_output(self._find_item(call), entry.output))

    def _spend(self, spent: UsageCost) -> None:
        self.usage += spent.usage
        if spent.cost is None:
            self.unpriced += spent.usage
        else:
            self.charged += spent.cost

    def _find_open(self, call_id: str) -> ToolInvocation:
        for call in self.open:
            if call.call_id == call_id:
                return call
        raise ValueError(f"no call '{call_id}' is open")

    def _find_item(self, call: ToolInvocation) -> JsonObject:
        """The item that an open call stands for: the last of its id, since ids may come again."""
        items = (item for item in reversed(self.history) if item.get("type") in OUTPUTS)
        return next(item for item in items if item.get("call_id") == call.call_id)

    def _place(self, call: ToolInvocation) -> int:
        """Outputs stand in the order of their calls, whichever came first."""
        position = self.calls.index(call)
        later = {each.call_id for each in self.calls[position + 1 :]}
        for index in range(self.sent, len(self.history)):
            if self.history[index].get("call_id") in later:
                return index
        return len(self.history)


def text_of(items: Sequence[JsonObject], *, kinds: Sequence[str] = ("output_text", "input_text", "text")) -> str:
    """The text of the messages among these items."""
    texts: list[str] = []
    for item in items:
        if item.get("type", "message") == "message":
            known = (part for part in _list_parts(item.get("content")) if part.get("type") in kinds)
            texts += [str(part.get("text") or part.get("refusal") or "") for part in known]
    return "".join(texts)


def _list_parts(content: Any) -> list[JsonObject]:
    """What a message is made of. Whatever a server has put there, a run that has been written down stays readable."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def calls_of(items: Sequence[JsonObject]) -> list[ToolInvocation]:
    return [as_call(item) for item in items if item.get("type") in OUTPUTS]


_decoder = msgspec.json.Decoder(Entry)
_states = msgspec.json.Decoder(tuple[str, list[Entry]])

_LONGEST_TITLE = 200


class Journal:
    """Writes entries, and keeps the state that they amount to."""

    def __init__(self, run_id: str, *, ledger: Ledger | None = None, entries: Sequence[Entry] = ()) -> None:
        """Raises ValueError for entries that are no run."""
        self.run_id = run_id
        self.state = State()
        self._ledger = ledger
        self._entries: list[Entry] = []
        self._turn = asyncio.Lock()
        for entry in entries:
            if isinstance(entry, Began) is bool(self._entries):
                raise ValueError("a run begins once, and first")
            self._take(entry)

    async def write(self, entry: Entry) -> None:
        """Write an entry down. Raises EntryTaken if another process has gone on with the run."""
        if self._ledger is None:
            self._take(entry)
            return
        async with self._turn:
            # What is on disk stays there: an entry that makes no sense would make the whole run unreadable.
            self.state.check(entry)
            await self._ledger.append(
                self.run_id,
                len(self._entries),
                msgspec.json.encode(entry),
                status=_status(entry),
                title=_title(entry),
            )
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        self.state.apply(entry)
        self._entries.append(entry)

    def pack(self) -> bytes:
        """The whole run, to go on with it elsewhere."""
        return msgspec.json.encode((self.run_id, self._entries))


def unpack(packed: bytes, *, ledger: Ledger | None = None) -> Journal:
    """A run out of what `pack` gave."""
    try:
        run_id, entries = _states.decode(packed)
        return _restore(run_id, entries, ledger)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"This is not the state of a run: {error}.", param="run", code="invalid_state") from None


async def load(run_id: str, ledger: Ledger) -> Journal:
    """A run out of a ledger. Raises InvalidRequest if there is none of this id."""
    written = await ledger.read(run_id)
    if not written:
        raise InvalidRequest(f"There is no run with id '{run_id}'.", param="run_id", code="run_not_found")
    try:
        return _restore(run_id, map(_decoder.decode, written), ledger)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(
            f"The entries of the run '{run_id}' cannot be read: {error}.", param="run_id", code="invalid_state"
        ) from None


def _restore(run_id: str, entries: Iterable[Entry], ledger: Ledger | None) -> Journal:
    known = list(entries)
    if not known:
        raise ValueError("it has no entries")
    return Journal(run_id, ledger=ledger, entries=known)


def _status(entry: Entry) -> str | None:
    if isinstance(entry, Ended):
        return entry.kind
    return "running" if isinstance(entry, Began | Resumed) else None


def _title(entry: Entry) -> str:
    return text_of(entry.input[-1:])[:_LONGEST_TITLE] if isinstance(entry, Began) else ""
