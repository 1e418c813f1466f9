"""The journal of a run: a list of entries, from which the state of the run is derived.

A live run and a resumed run derive the same state from the same entries. With a ledger, each entry is on disk before
the next step that depends on it.
"""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from antiphon.agent.entries import EndEntry, Entry, ResumeEntry, StartEntry
from antiphon.agent.history import join_text
from antiphon.agent.ownership import Ownership
from antiphon.agent.run_state import RunState
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger
from antiphon.tools.base import PendingReason, PendingToolCall, ToolInvocation

_MAX_TITLE = 200

_entry_decoder = msgspec.json.Decoder(Entry)
_packed_decoder = msgspec.json.Decoder(list[msgspec.Raw])

# The last element of a packed run that is also in a ledger.
_STORED = "stored"


class Journal:
    """Writes the entries of a run and holds the state derived from them."""

    def __init__(
        self,
        run_id: str,
        *,
        ledger: Ledger | None = None,
        entries: Sequence[Entry] = (),
        ownership: Ownership | None = None,
    ) -> None:
        """Raises ValueError for entries that are not those of a run."""
        self.run_id = run_id
        self.state = RunState()
        self.ownership = ownership
        """The lease on this run, or on the run whose subagent this is. None without a ledger that has leases."""
        self.is_stored = ledger is not None
        """True if the run is in a ledger, even if this journal was restored without it."""
        self.subagents: dict[str, Journal] = {}
        """The runs of subagents that this process has started, by their ids: the idempotency keys of their calls.

        All runs below one first run share it.
        """
        self.failure: Exception | None = None
        """The exception of the ledger because of which an entry of this run, or of a subagent's, is missing."""
        self._ledger = ledger
        self._entries: list[Entry] = []
        self._write_lock = asyncio.Lock()
        for entry in entries:
            if isinstance(entry, StartEntry) is bool(self._entries):
                raise ValueError("a run has one start entry, and it is the first entry")
            self._add(entry)

    @property
    def entry_count(self) -> int:
        return len(self._entries)

    @property
    def is_durable(self) -> bool:
        """True if a write awaits a ledger. Otherwise it does not suspend."""
        return self._ledger is not None

    def make_key(self, call: ToolInvocation) -> str:
        """Return the idempotency key of a call of the last turn.

        It is equal for all attempts at the call, and for no other call: a model may use a call id twice. A call that
        repeats an unresolved one of an earlier run has its key.
        """
        inherited = self.state.find_inherited(call)
        if inherited is not None:
            return inherited.idempotency_key
        return f"{self.run_id}:{self.state.turns}:{self.state.calls.index(call)}"

    def find_subagent(self, call: ToolInvocation) -> "Journal | None":
        """Return the run of the subagent that a call of the last turn has started in this process."""
        return self.subagents.get(self.make_key(call))

    def make_pending(self, call: ToolInvocation, reason: PendingReason) -> PendingToolCall:
        """Return a call of the last turn as one that waits for a person."""
        return PendingToolCall(call.call_id, call.name, call.arguments, reason, self.make_key(call))

    async def write(self, entry: Entry) -> None:
        """Append an entry. Raises RunTaken if another process has taken over the run."""
        if self._ledger is None:
            self._add(entry)
            return
        async with self._write_lock:
            # A stored entry cannot be removed: an invalid one would make the whole run unreadable.
            self.state.check(entry)
            owned = {} if self.ownership is None else {"holder": self.ownership.holder}
            try:
                await self._ledger.append(
                    self.run_id,
                    len(self._entries),
                    msgspec.json.encode(entry),
                    status=_find_status(entry),
                    title=_find_title(entry),
                    **owned,
                )
            except Exception as error:
                self.failure = error
                raise
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self.state.apply(entry)
        self._entries.append(entry)

    def pack(self) -> bytes:
        """Return the whole run as bytes, to resume it elsewhere. A run with a ledger can be resumed only with it."""
        marks = () if self._ledger is None else (_STORED,)
        return msgspec.json.encode((self.run_id, self._entries, *marks))


def unpack(packed: bytes, *, ledger: Ledger | None = None) -> Journal:
    """Return the journal of a packed run. Raises InvalidRequest for other bytes."""
    try:
        run_id, entries, *marks = _packed_decoder.decode(packed)
        journal = _restore(
            msgspec.json.decode(run_id, type=str), msgspec.json.decode(entries, type=list[Entry]), ledger
        )
        journal.is_stored = bool(marks)
        return journal
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"This is not the state of a run: {error}.", param="run", code="invalid_state") from None


async def load(run_id: str, ledger: Ledger) -> Journal:
    """Return the journal of a run in a ledger. Raises InvalidRequest if there is no run with this id."""
    entries = await ledger.read(run_id)
    if not entries:
        raise InvalidRequest(f"There is no run with id '{run_id}'.", param="run_id", code="run_not_found")
    try:
        return _restore(run_id, map(_entry_decoder.decode, entries), ledger)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(
            f"The entries of the run '{run_id}' cannot be read: {error}.", param="run_id", code="invalid_state"
        ) from None


def _restore(run_id: str, entries: Iterable[Entry], ledger: Ledger | None) -> Journal:
    restored = list(entries)
    if not restored:
        raise ValueError("it has no entries")
    return Journal(run_id, ledger=ledger, entries=restored)


def _find_status(entry: Entry) -> str | None:
    if isinstance(entry, EndEntry):
        return entry.kind
    return "running" if isinstance(entry, StartEntry | ResumeEntry) else None


def _find_title(entry: Entry) -> str:
    return join_text(entry.input[-1:])[:_MAX_TITLE] if isinstance(entry, StartEntry) else ""
