"""Blocks of the event loop in the log of a server process."""

import re

_BLOCK = re.compile(r"the event loop (?:was|has been) blocked for \d+ ms, with (\d+) ms of CPU time[^\n]*")
# The CPU seconds of a block that no server may reach. The work takes less than 0.1 seconds on an idle machine.
# The same work takes up to twice the CPU time while other processes share the caches and cores. Defects take seconds.
MAX_BLOCK = 0.3


def longest_block(log: str) -> float:
    """Return the CPU seconds of the longest block that the watchdog has logged, or 0."""
    return max((int(found[1]) / 1000 for found in _BLOCK.finditer(log)), default=0.0)


def assert_no_block(log: str) -> None:
    """Fail if the server blocked its event loop. Only CPU time of the loop's thread counts."""
    blocks = [found[0] for found in _BLOCK.finditer(log) if int(found[1]) / 1000 > MAX_BLOCK]
    assert not blocks, "\n".join(blocks)
