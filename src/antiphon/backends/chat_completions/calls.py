"""Which call a piece belongs to.

By the book, each piece has the index of its call, and the first one its id and name. Servers leave the index out or
give every call the same, leave ids out, send new ones with every piece, give two calls the same one, repeat the name,
and send everything a second time at the end.
"""

from typing import Any

import msgspec

from antiphon.backends.chat_completions.chunks import CallPiece, Function
from antiphon.stream.deltas import ToolCall


class _Call:
    """A call so far."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.id: str | None = None
        self.call_id: str | None = None
        self.name = ""
        self.arguments: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not any(piece.strip() for piece in self.arguments)

    def is_whole(self) -> bool:
        last = next((piece for piece in reversed(self.arguments) if piece.strip()), "")
        if not last.rstrip().endswith("}"):
            return False
        try:
            msgspec.json.decode("".join(self.arguments))
        except msgspec.DecodeError:
            return False
        return True


class Calls:
    """The calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def read(self, piece: CallPiece) -> ToolCall | None:
        """What this piece adds, if it adds something."""
        function = piece.function or Function()
        name, arguments = function.name or "", _write(function.arguments)
        given = str(piece.id) if piece.id not in (None, "") else None
        call = self._find(piece.index, given, name, arguments)
        if call is None:
            call = self._begin(piece.index, given)
        elif given is not None and given == call.id and name and arguments and call.is_whole():
            return None  # told a second time
        named = name if not call.name else ""
        call.name = call.name or name
        call.arguments.append(arguments)
        return ToolCall(call.key, arguments, named, call.call_id) if named or arguments else None

    def find_id(self, piece: CallPiece) -> str | None:
        """The id of the call that was told of last for this piece's index or id."""
        given = str(piece.id) if piece.id not in (None, "") else None
        call = self._by_id.get(given) if given is not None else None
        if call is None and piece.index is not None:
            call = self._by_index.get(piece.index)
        if call is None and self._calls:
            call = self._calls[-1]
        return call.call_id if call is not None else given

    def fill_empty(self) -> list[ToolCall]:
        """Models call a function that takes nothing with no arguments at all; clients expect an object."""
        return [ToolCall(call.key, "{}") for call in self._calls if call.is_empty]

    def _find(self, index: int | None, given: str | None, name: str, arguments: str) -> _Call | None:
        if index is not None:
            call = self._by_index.get(index)
            return None if call is None or _is_other(call, given, name, arguments) else call
        if given is not None:
            return self._by_id.get(given)
        if not self._calls:
            return None
        call = self._calls[-1]
        if name and name != call.name and call.name:
            return None
        return None if _is_other(call, None, name, arguments) else call

    def _begin(self, index: int | None, given: str | None) -> _Call:
        call = _Call(len(self._calls))
        call.id = given
        if given is not None and given not in self._by_id:
            call.call_id = given
            self._by_id[given] = call
        self._calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call


def _is_other(call: _Call, given: str | None, name: str, arguments: str) -> bool:
    """Whether a piece that comes where this call is begins another one. Only one with a name can."""
    if not name:
        return False
    if given is not None and call.id is not None:
        return given != call.id
    return bool(arguments.strip()) and call.is_whole()


def _write(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
