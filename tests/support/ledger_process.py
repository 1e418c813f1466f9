"""Programs that use a ledger in a process of their own, so that tests can kill them or run two on one file."""

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

from antiphon.ledger import RunTaken
from antiphon.store.ledger import SqliteLedger


def start_ledger_process(program: str, path: Path, argument: str) -> "subprocess.Popen[str]":
    """Start one of the programs below on the ledger at `path`."""
    return subprocess.Popen(
        [sys.executable, __file__, program, str(path), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def append_for_ever(ledger: SqliteLedger, run_id: str) -> None:
    """Append entries and print the number of each one that was written."""
    for number in itertools.count():
        await ledger.append(run_id, number, b"entry %d" % number, status="running", title=f"at {number}")
        report(str(number))


async def race(ledger: SqliteLedger, name: str) -> None:
    """Wait for a line of input, then try to write every number. Print the numbers that were written."""
    await ledger.read("run")
    report("ready")
    sys.stdin.readline()
    for number in range(50):
        try:
            await ledger.append("run", number, name.encode())
        except RunTaken:
            continue
        report(str(number))
    await ledger.close()


if __name__ == "__main__":
    name, path, argument = sys.argv[1:]
    asyncio.run({"append_for_ever": append_for_ever, "race": race}[name](SqliteLedger(path), argument))
