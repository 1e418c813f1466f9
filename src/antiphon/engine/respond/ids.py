"""Ids: time-ordered for index locality, and unguessable.

The ids of a response's items contain its token: `resp_T`, `msg_T0000`, `fc_T0001`. So the response of an item can be
derived from its id, and a repeated run gives its items the same ids.
"""

import os
import secrets
import string
import time

# Formatting a number costs more than making the rest of an id.
_HEX = [f"{number:02x}" for number in range(256)]
FIRST_NUMBERS = [f"{number:04x}" for number in range(256)]
_LETTERS = string.ascii_lowercase + string.digits


# Random bytes are fetched for many ids at once, because the system call is most of the cost. `list.pop` is atomic, so
# threads never get the same value. A forked process must not use the values of its parent.
_POOL: list[str] = []
_POOL_BYTES = 16 * 256
os.register_at_fork(after_in_child=_POOL.clear)


def random_hex() -> str:
    """Return sixteen random bytes in hex. No value is returned twice."""
    try:
        return _POOL.pop()
    except IndexError:
        fresh = os.urandom(_POOL_BYTES).hex()
        _POOL.extend(fresh[start : start + 32] for start in range(32, len(fresh), 32))
        return fresh[:32]


def new_token() -> str:
    return f"{time.time_ns() // 1_000_000:012x}{random_hex()}"


class Mint:
    """Creates the ids of one response and its items. `minted` is the number of item ids so far."""

    __slots__ = ("minted", "response_id", "token")

    def __init__(self, token: str | None = None, minted: int = 0) -> None:
        self.token = new_token() if token is None else token
        self.minted = minted
        self.response_id = f"resp_{self.token}"

    def new_id(self, prefix: str) -> str:
        """Return a new item id."""
        minted = self.minted
        self.minted = minted + 1
        if minted < len(FIRST_NUMBERS):
            return f"{prefix}_{self.token}{FIRST_NUMBERS[minted]}"
        if minted >= 0x10000:
            return f"{prefix}_{self.token}{minted:x}"
        return f"{prefix}_{self.token}{_HEX[minted >> 8]}{_HEX[minted & 255]}"


class BrandedMint(Mint):
    """Creates ids with a configured prefix: `resp_AM-1763164800000-k3j9x0ab`, `msg_AM-0f4kq2m81zzt`.

    The response of an item cannot be derived from them. They are for responses that are not stored.
    """

    __slots__ = ("_brand",)

    def __init__(self, brand: str) -> None:
        super().__init__(f"{brand}{time.time_ns() // 1_000_000}-{_draw(8)}")
        self._brand = brand

    def new_id(self, prefix: str) -> str:
        self.minted += 1
        return f"{prefix}_{self._brand}{_draw(12)}"


def _draw(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))
