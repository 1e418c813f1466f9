"""What a request tells of its history again: by ids, by the calls that outputs answer, and by the order of messages."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from antiphon.engine.history import OUTPUTS, read_words
from antiphon.engine.repair import find_lone_calls
from antiphon.errors import InvalidRequest
from antiphon.protocol.codec import encode
from antiphon.protocol.items import Item, ItemReference, Message
from antiphon.protocol.open import Unknown


class Repeats:
    """What the history holds, and how far the input has told it again. What it says is read only if need be.

    `again` are the ids in the input.
    """

    def __init__(self, items: Sequence[Item | Unknown], *, again: set[str | None]) -> None:
        self._items = items
        self._places: dict[str | None, list[int]] = {}
        for place, item in enumerate(items):
            self._places.setdefault(identify(item), []).append(place)
        self._words: dict[str, set[tuple[str, ...]]] = {}
        self._told = 0
        self._waiting = {items[index].id: call_id for index, call_id in find_lone_calls(items).items()}
        # If the input has such a call again, outputs before it are those of earlier calls with its id.
        for item_id in self._waiting.keys() - again:
            self.forget_output(self._waiting[item_id])

    def has(self, identity: str) -> bool:
        return identity in self._places

    def forget_output(self, call_id: str) -> None:
        """From now on, an output for this call is a new one."""
        self._places.pop(_name_output(call_id), None)

    def note(self, item: Item | Unknown, identity: str, index: int) -> None:
        """Take note of an item that comes again. Raises if all of them say something else."""
        if not isinstance(item, ItemReference):
            if identity not in self._words:
                self._words[identity] = {read_words(self._items[place]) for place in self._places[identity]}
            # Only words count: clients leave out much of what an item has.
            if read_words(item) not in self._words[identity]:
                raise _differs(item, index)
        if item.id in self._waiting:
            self.forget_output(self._waiting[item.id])

    def find_messages(self, identity: str, messages: Mapping[int, Message]) -> list[int]:
        """Which of these messages, sent just before an item of the history, the history has before that item.

        One that only says the same as an earlier one is not among them, unless it comes in the same order: between
        those that have come again, or before the first of them.
        """
        places = self._places.get(identity, ())
        nearest = bisect_left(places, self._told)
        if nearest == len(places):  # it is out of order, and tells nothing about others
            return []
        begin, end = self._told, places[nearest]
        self._told = end + 1
        if not messages:
            return []
        said: dict[tuple[object, ...], list[int]] = {}
        for place in range(begin, end):
            item = self._items[place]
            if isinstance(item, Message):
                said.setdefault(_read_message(item), []).append(place)
        found: list[int] = []
        for index, message in messages.items():
            alike = said.get(_read_message(message), ())
            nearest = bisect_left(alike, begin)
            if nearest < len(alike):
                found.append(index)
                begin = alike[nearest] + 1
        return found


def _differs(item: Item | Unknown, index: int) -> InvalidRequest:
    if isinstance(item, OUTPUTS):
        return InvalidRequest(
            f"The history has another output for call_id {item.call_id}.", param=f"input[{index}]", code="invalid_value"
        )
    return InvalidRequest(
        f"The history has another item with id '{item.id}'. Send this one with an id of its own, or without one.",
        param=f"input[{index}].id",
        code="invalid_value",
    )


def _read_message(message: Message) -> tuple[object, ...]:
    """All that a message says, in words or otherwise, whatever kind of text the words are in."""
    if isinstance(message.content, str):
        return message.role, message.content
    return message.role, *(getattr(part, "text", None) or encode(part) for part in message.content)


def identify(item: Item | Unknown) -> str | None:
    """What tells an item from all others: for an output the call it answers, since clients give outputs no ids."""
    if isinstance(item, OUTPUTS) and item.call_id is not None:
        return _name_output(item.call_id)
    return item.id


def _name_output(call_id: str) -> str:
    return f"the output of {call_id}"
