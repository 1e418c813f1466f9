"""Blocks of the event loop in the log of a server process."""

import re

_BLOCK = re.compile(r"the event loop (?:was|has been) blocked for \d+ ms, with (\d+) ms of CPU time[^\n]*")
# A limit for servers under normal load. CPU time does not depend on the load of the machine.
MAX_CPU_SECONDS = 0.1


def longest_block(log: str) -> float:
    """Return the CPU seconds of the longest block that the watchdog has logged, or 0."""
    return max((int(found[1]) / 1000 for found in _BLOCK.finditer(log)), default=0.0)


def assert_no_block(log: str) -> None:
    """Fail if the server blocked its event loop. Only CPU time of the loop's thread counts."""
    blocks = [found[0] for found in _BLOCK.finditer(log) if int(found[1]) / 1000 > MAX_CPU_SECONDS]
    assert not blocks, "\n".join(blocks)
