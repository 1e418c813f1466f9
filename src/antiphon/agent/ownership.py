"""Ownership of a run: one process executes it, and renews its lease in the ledger while it does.

The ledger accepts entries of the owner only, so a process that has lost its run stops before its next tool call. The
lease protects a run that is being executed from being resumed elsewhere by mistake. It does not delay a resume after a
crash on the same machine: there, an owner whose process has ended is recognized at once.
"""

import asyncio
import logging
import os
import platform
import secrets
from pathlib import Path

from antiphon.ledger import Holder, Lease, Leases, Ledger, RunTaken

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""The time after which a run can be resumed if its owner has stopped renewing the lease."""

_RENEWALS_PER_LEASE = 3

# The owners of the runs that this process executes.
_active_owners: set[str] = set()


class Ownership:
    """The lease of this process on one run. `idle_seconds` is the time for which no process had worked on it."""

    def __init__(self, ledger: Leases, run_id: str, owner: str, *, idle_seconds: float = 0.0) -> None:
        self.holder = Holder(run_id, owner)
        self.idle_seconds = idle_seconds
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._renewal: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    async def check(self) -> None:
        """Raise RunTaken if another process has taken over the run."""
        lease = await self._ledger.find_lease(self.holder.run_id)
        if lease is None or lease.owner != self.holder.owner:
            raise RunTaken(self.holder.run_id)

    async def release(self) -> None:
        """End the lease. Another process can resume the run at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._renewal is not None:
            self._renewal.cancel()
        _active_owners.discard(self.holder.owner)
        try:
            await self._ledger.release(self.holder.run_id, self.holder.owner)
        except Exception as error:
            # The lease ends by itself, and within this machine it is known to be free.
            logger.warning("cannot release the run %s: %s", self.holder.run_id, error)

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(LEASE_SECONDS / _RENEWALS_PER_LEASE, self._start_renewal)

    def _start_renewal(self) -> None:
        self._renewal = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        run_id, owner = self.holder.run_id, self.holder.owner
        try:
            if not await self._ledger.hold(run_id, owner, LEASE_SECONDS, instead_of=owner):
                # The next entry raises RunTaken.
                return
        except Exception as error:
            logger.warning("cannot renew the lease of the run %s: %s", run_id, error)
        self._schedule()


def has_leases(ledger: Ledger) -> bool:
    """Return True if the ledger has leases. Ledgers that were written for version 0.1.0 have none."""
    return hasattr(ledger, "hold")


async def take_ownership(ledger: Leases, run_id: str, *, force: bool = False) -> Ownership:
    """Become the owner of a run. Raises RunTaken if a process executes it, unless `force` is set."""
    lease = await ledger.find_lease(run_id)
    owner = "" if lease is None else lease.owner
    if is_executed(lease) and not force:
        raise RunTaken(
            run_id,
            f"Another process is executing the run '{run_id}'. Resume it with force to take it over.",
        )
    new_owner = _make_owner()
    # Before the lease is visible to others, so that they do not take its owner for one that has stopped.
    _active_owners.add(new_owner)
    is_held = False
    try:
        is_held = await ledger.hold(run_id, new_owner, LEASE_SECONDS, instead_of=owner)
    finally:
        if not is_held:
            _active_owners.discard(new_owner)
    if not is_held:
        raise RunTaken(run_id)
    return Ownership(ledger, run_id, new_owner, idle_seconds=0.0 if lease is None else lease.idle_seconds)


def is_executed(lease: Lease | None) -> bool:
    """Return True if a process that has not ended holds this lease."""
    return lease is not None and bool(lease.owner) and lease.seconds_left > 0 and not is_owner_gone(lease.owner)


def is_owner_gone(owner: str) -> bool:
    """Return True if this owner is known to have stopped: its process has ended, or has left the run.

    The owners on other machines are not known.
    """
    machine, process_id, started, _ = owner.rsplit("/", 3) if owner.count("/") >= 3 else ("", "", "", "")
    if machine != _read_machine():
        return False
    if process_id == str(os.getpid()) and started == _read_start(os.getpid()):
        return owner not in _active_owners
    return not _is_running(int(process_id), started)


def _make_owner() -> str:
    process_id = os.getpid()
    return f"{_read_machine()}/{process_id}/{_read_start(process_id)}/{secrets.token_hex(8)}"


def _read_machine() -> str:
    """Return a name of the process ids' scope: of this boot of the machine and, in containers, of the namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return platform.node()


def _is_running(process_id: int, started: str) -> bool:
    if started:
        return _read_start(process_id) == started
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read_start(process_id: int) -> str:
    """Return the start time of a running process. "" if it has ended, or on systems without /proc."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = fields[0], fields[19]
    return "" if state in "ZX" else started
