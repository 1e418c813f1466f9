"""Param paths of items: map an item's index in a turn to its path in the client's request, as errors name it."""

import re
from collections.abc import Sequence

from antiphon.backends.base import Turn
from antiphon.errors import InvalidRequest
from antiphon.protocol.items import Item
from antiphon.protocol.unions import Unknown

_INPUT_INDEX = re.compile(r"input\[(\d+)\]")


class ParamPaths:
    """The param paths of a request's input items.

    `items` is the whole input: the items of the prompt template, then `client_input`, the input that the client sent.
    A template item is `prompt.input[0]`, a client item `input[0]`.
    """

    def __init__(self, items: Sequence[Item | Unknown], client_input: str | list[Item | Unknown] | None) -> None:
        self._items = items
        self._indexes: Sequence[int] = range(len(items))
        sent = len(client_input) if isinstance(client_input, list) else client_input is not None
        self._template_size = len(items) - sent

    def select(self, items: Sequence[Item | Unknown], indexes: Sequence[int]) -> None:
        """Continue with these items only. `indexes` are their positions in the whole input."""
        self._items, self._indexes = items, indexes

    def rewrite_warnings(self, warnings: Sequence[str]) -> list[str]:
        """Return the warnings with the client's param path in front of each."""
        return [self._rewrite(warning) for warning in warnings]

    def rewrite_error(self, error: InvalidRequest) -> None:
        """Replace an item's index in the error by the client's param path."""
        if error.param is not None:
            _replace_param(error, error.param, self._rewrite(error.param))

    def find_param(self, item: Item | Unknown) -> str | None:
        """Return the param path of an item, or of the item it was made from. None if the request did not send it."""
        indexes = range(len(self._items))
        found = next((index for index in indexes if self._items[index] is item), None)
        if found is None and item.id:
            found = next((index for index in indexes if self._items[index].id == item.id), None)
        return None if found is None else self._name_param(found)

    def _rewrite(self, text: str) -> str:
        found = _INPUT_INDEX.match(text)
        return text if found is None else self._name_param(int(found[1])) + text[found.end() :]

    def _name_param(self, index: int) -> str:
        whole = self._indexes[index]
        return f"prompt.input[{whole}]" if whole < self._template_size else f"input[{whole - self._template_size}]"


def rewrite_backend_error(error: InvalidRequest, turn: Turn) -> None:
    """Replace an item's index in the turn, as a backend names it, by the client's param path.

    An item that the request did not send is named by its id, and the error's param is the field that brought it.
    """
    found = _INPUT_INDEX.match(error.param or "")
    if found is None or int(found[1]) >= len(turn.items):
        return
    item = turn.items[int(found[1])]
    param = turn.find_param(item) if turn.find_param is not None else None
    if param is not None:
        _replace_param(error, found[0], param)
        return
    named = f"the item '{item.id}'" if item.id else "an earlier item"
    _replace_param(error, found[0], item.id or "item")
    _update(error, f"In {named}: {error.message}", _name_history_param(turn))


def _name_history_param(turn: Turn) -> str | None:
    return next((name for name in ("previous_response_id", "conversation") if getattr(turn.request, name)), None)


def _replace_param(error: InvalidRequest, old: str, new: str) -> None:
    assert error.param is not None
    _update(error, error.message.replace(old, new), error.param.replace(old, new, 1))


def _update(error: InvalidRequest, message: str, param: str | None) -> None:
    error.message, error.param = message, param
    error.args = (message,)
