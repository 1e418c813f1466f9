"""Ids: time-ordered, so that they sit together in an index, and unguessable, so that nobody finds one by trying.

A response's items carry its token in their own ids: `resp_T`, `msg_T0000`, `fc_T0001`. So an item leads back to the
response it was made in, and a run that is repeated gives its items the same ids again.
"""

import os
import secrets
import string
import time

_LETTERS = string.ascii_lowercase + string.digits


# Randomness is fetched from the system for many ids at once: fetching it is most of the price of one. Taking from the
# end of a list is one step, so threads cannot get the same; a forked process must not go on with its parent's.
_POOL: list[str] = []
_POOL_BYTES = 16 * 256
os.register_at_fork(after_in_child=_POOL.clear)


def random_hex() -> str:
    """Sixteen random bytes in hex, never given twice."""
    try:
        return _POOL.pop()
    except IndexError:
        fresh = os.urandom(_POOL_BYTES).hex()
        _POOL.extend(fresh[start : start + 32] for start in range(32, len(fresh), 32))
        return fresh[:32]


def new_token() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{random_hex()}"


class Mint:
    """Makes the ids of one response and its items."""

    def __init__(self, token: str | None = None, minted: int = 0) -> None:
        self.token = new_token() if token is None else token
        self.minted = minted

    @property
    def response_id(self) -> str:
        return f"resp_{self.token}"

    def __call__(self, prefix: str) -> str:
        minted, self.minted = self.minted, self.minted + 1
        return f"{prefix}_{self.token}{minted:04x}"


class BrandedMint(Mint):
    """Makes ids that show whose they are: `resp_AM-1763164800000-k3j9x0ab`, `msg_AM-0f4kq2m81zzt`.

    They lead nowhere, so they are only for responses that nobody will look up.
    """

    def __init__(self, brand: str) -> None:
        super().__init__(f"{brand}{time.time_ns() // 1_000_000}-{_draw(8)}")
        self._brand = brand

    def __call__(self, prefix: str) -> str:
        self.minted += 1
        return f"{prefix}_{self._brand}{_draw(12)}"


def _draw(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))
