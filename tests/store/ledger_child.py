"""Programs that the tests of the ledger start as processes of their own: `ledger_child.py PROGRAM PATH ARGUMENT`."""

import asyncio
import itertools
import sys

from antiphon.ledger import EntryTaken
from antiphon.store.ledger import SqliteLedger


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def append_for_ever(ledger: SqliteLedger, run_id: str) -> None:
    """Say each number once it is written."""
    for number in itertools.count():
        await ledger.append(run_id, number, b"entry %d" % number, status="running", title=f"at {number}")
        report(str(number))


async def race(ledger: SqliteLedger, name: str) -> None:
    """Try to take each number of the run, and say which were had. It starts when it is told to."""
    await ledger.read("run")
    report("ready")
    sys.stdin.readline()
    for number in range(50):
        try:
            await ledger.append("run", number, name.encode())
        except EntryTaken:
            continue
        report(str(number))
    await ledger.close()


program, path, argument = sys.argv[1:]
asyncio.run({"append_for_ever": append_for_ever, "race": race}[program](SqliteLedger(path), argument))
