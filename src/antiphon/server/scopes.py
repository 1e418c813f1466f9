"""The scopes of API keys.

A scope includes the ones before it: `admin` allows everything that `inference` allows, and `inference` everything that
`read` allows.
"""

from collections.abc import Iterable
from enum import IntEnum


class Scope(IntEnum):
    READ = 1
    INFERENCE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """The name as users write it."""
        return self.name.lower()


READ, INFERENCE, ADMIN = Scope.READ, Scope.INFERENCE, Scope.ADMIN


def find_highest_scope(labels: Iterable[str]) -> Scope | None:
    """Return the scope that includes all others of a key, or None if the key has no known scope."""
    known = (Scope.__members__.get(label.upper()) for label in labels)
    return max((scope for scope in known if scope is not None), default=None)
