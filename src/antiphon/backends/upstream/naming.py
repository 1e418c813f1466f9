"""Which model has answered, where the upstream names another one than it was asked for: a router, or an alias there."""

from collections.abc import Sequence
from typing import Any

from antiphon.stream.deltas import Delta, Served

LONGEST_NAME = 200


class Naming:
    """Of one answer. `backend` is what the configuration calls the upstream, `asked` the model that was asked for."""

    def __init__(self, backend: str, asked: str) -> None:
        self._backend = backend
        self._asked = asked
        self._name = asked

    def hear(self, name: Any) -> None:
        """What the upstream calls the model. Not every server keeps to names."""
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME:
            self._name = name

    def introduce(self, told: Sequence[Delta]) -> Sequence[Delta]:
        """The first words, and who says them, if that is to be told."""
        if self._name == self._asked:
            return told
        return [Served(self._asked, self._backend, self._name), *told]
