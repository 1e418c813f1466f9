"""What a run has done so far, as a list of entries; everything else about the run follows from them.

A live run and one that is resumed build the same state from the same entries, so there is no second way for a run to
come to be where it is. With a ledger each entry is on disk before anything is done that depends on it.
"""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from antiphon.agent.entries import Began, Ended, Entry, Resumed
from antiphon.agent.state import State, text_of
from antiphon.errors import InvalidRequest
from antiphon.ledger import Ledger

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
