"""Where items stand, as the client knows it: what is told of an item names it so."""

import re
from collections.abc import Sequence

from antiphon.backends.base import Turn
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown

_INDEX = re.compile(r"input\[(\d+)\]")


class Places:
    """The places of new items in the client's own input, or in the template of its prompt, which came before it.

    `asked` are all that were asked; of those, `keep` says which are new.
    """

    def __init__(self, asked: Sequence[Item | Unknown], own: str | list[Item | Unknown] | None) -> None:
        self._items = asked
        self._left: Sequence[int] = range(len(asked))
        self._front = len(asked) - (len(own) if isinstance(own, list) else own is not None)

    def keep(self, items: Sequence[Item | Unknown], left: Sequence[int]) -> None:
        """Look at these items from now on; `left` has, for each, its index among all that were asked."""
        self._items, self._left = items, left

    def name_all(self, told: Sequence[str]) -> list[str]:
        """What is told of items, each under its right name."""
        return [self._name(each) for each in told]

    def correct(self, error: InvalidRequest) -> None:
        """Let an error that names an item by its index name the right one."""
        if error.param is not None:
            _rename(error, error.param, self._name(error.param))

    def find(self, item: Item | Unknown) -> str | None:
        """Where this item stands, or the one that it was made from. What has not come with the request has no place."""
        places = range(len(self._items))
        index = next((place for place in places if self._items[place] is item), None)
        if index is None and item.id:
            index = next((place for place in places if self._items[place].id == item.id), None)
        return None if index is None else self._say(index)

    def _name(self, told: str) -> str:
        found = _INDEX.match(told)
        return told if found is None else self._say(int(found[1])) + told[found.end() :]

    def _say(self, index: int) -> str:
        place = self._left[index]
        return f"prompt.input[{place}]" if place < self._front else f"input[{place - self._front}]"


def relocate(error: InvalidRequest, turn: Turn) -> None:
    """Let an error of a backend, which names an item by its place in the turn, name it as the client knows it.

    An item that did not come with the request is named by its id: no place in the input is to blame for it.
    """
    found = _INDEX.match(error.param or "")
    if found is None or int(found[1]) >= len(turn.items):
        return
    item = turn.items[int(found[1])]
    place = turn.find_place(item) if turn.find_place is not None else None
    if place is not None:
        _rename(error, found[0], place)
        return
    named = f"the item '{item.id}'" if item.id else "an earlier item"
    _rename(error, found[0], item.id or "item")
    _tell(error, f"In {named}: {error.message}", _name_continued(turn))


def _name_continued(turn: Turn) -> str | None:
    return next((name for name in ("previous_response_id", "conversation") if getattr(turn.request, name)), None)


def _rename(error: InvalidRequest, wrong: str, right: str) -> None:
    assert error.param is not None
    _tell(error, error.message.replace(wrong, right), error.param.replace(wrong, right, 1))


def _tell(error: InvalidRequest, message: str, param: str | None) -> None:
    error.message, error.param = message, param
    error.args = (message,)
