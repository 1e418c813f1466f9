"""Which call a piece belongs to.

By the book, each piece has the index of its call, and the first one its id and name. Servers leave the index out or
give every call the same, leave ids out, send new ones with every piece, give two calls the same one, repeat the name,
and send everything a second time at the end. What is told again has the same name and arguments: all else is another
call, whatever its id.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.chat_completions.wire import CallPiece, Function
from antiphon.protocol.json_text import read_json
from antiphon.stream.deltas import ToolCall


class _Call:
    """A call so far."""

    def __init__(self, key: int, given: str | None) -> None:
        self.key = key
        self.id = given
        self.call_id: str | None = None
        self.name = ""
        self.arguments: list[str] = []
        self.is_settled = False

    @property
    def is_empty(self) -> bool:
        return not any(piece.strip() for piece in self.arguments)

    def is_whole(self) -> bool:
        last = next((piece for piece in reversed(self.arguments) if piece.strip()), "")
        return last.rstrip().endswith("}") and _read("".join(self.arguments)) is not None

    def find_rest(self, name: str, arguments: str) -> str | None:
        """What a call that is known as a whole has beyond this one; None if it is another one."""
        told = "".join(self.arguments)
        if name != self.name:
            return None
        if arguments.startswith(told):
            return arguments[len(told) :]
        read = _read(told)
        return "" if read is not None and read == _read(arguments) else None

    def add(self, name: str, arguments: str) -> ToolCall | None:
        named = name if not self.name else ""
        self.name = self.name or name
        self.arguments.append(arguments)
        if not named and not arguments:
            return None
        self.is_settled = False
        return ToolCall(self.key, arguments, named, self.call_id)


class Calls:
    """The calls of one answer."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def read(self, piece: CallPiece) -> ToolCall | None:
        """What this piece adds, if it adds something."""
        given, name, arguments = _take_apart(piece)
        call = self._find(piece.index, given, name, arguments)
        if call is None:
            is_placed = piece.index is not None and piece.index not in self._by_index
            if not is_placed and given in self._by_id and self._has_told(given, name, arguments):
                return None
            call = self._begin(piece.index, given)
        return call.add(name, arguments)

    def catch_up(self, pieces: Sequence[CallPiece]) -> list[ToolCall]:
        """What a list of all calls, told after pieces of them, has beyond these."""
        told: list[ToolCall | None] = []
        left = list(self._calls)
        for piece in pieces:
            given, name, arguments = _take_apart(piece)
            for call in left:
                rest = call.find_rest(name, arguments)
                if rest == "" or (rest is not None and (given is None or call.id in (None, given))):
                    left.remove(call)
                    told.append(call.add("", rest))
                    break
            else:
                told.append(self._begin(None, given).add(name, arguments))
        return [each for each in told if each is not None]

    def find_id(self, piece: CallPiece) -> str | None:
        """The id of the call that was told of last for this piece's index or id."""
        given = _take_apart(piece)[0]
        call = self._by_id.get(given) if given is not None else None
        if call is None and piece.index is not None:
            call = self._by_index.get(piece.index)
        if call is None and self._calls:
            call = self._calls[-1]
        return call.call_id if call is not None else given

    def settle(self) -> None:
        """The model is done with all calls so far, whatever it has made of them."""
        for call in self._calls:
            call.is_settled = True

    def are_torn(self) -> bool:
        """Whether a call that the model was not done with lacks something."""
        return any(not call.is_settled and not call.is_whole() for call in self._calls)

    def fill_empty(self) -> list[ToolCall]:
        """Models call a function that takes nothing with no arguments at all; clients expect an object."""
        return [ToolCall(call.key, "{}") for call in self._calls if call.is_empty]

    def _find(self, index: int | None, given: str | None, name: str, arguments: str) -> _Call | None:
        if index is not None:
            call = self._by_index.get(index)
        elif given is not None:
            call = self._by_id.get(given)
        else:
            call = self._calls[-1] if self._calls else None
            if call is not None and _is_renamed(call, name):
                return None
        return None if call is None or _is_other(call, given, name, arguments) else call

    def _has_told(self, given: str | None, name: str, arguments: str) -> bool:
        return any(call.id == given and call.find_rest(name, arguments) == "" for call in self._calls)

    def _begin(self, index: int | None, given: str | None) -> _Call:
        call = _Call(len(self._calls), given)
        self._calls.append(call)
        if given is not None:
            if given not in self._by_id:  # else it has to get an id of its own
                call.call_id = given
            self._by_id[given] = call
        if index is not None:
            self._by_index[index] = call
        return call


def _is_other(call: _Call, given: str | None, name: str, arguments: str) -> bool:
    """Whether a piece that comes where this call is begins another one. Only one with a name can."""
    if not name:
        return False
    if given is not None and call.id is not None and given != call.id:
        return True
    # By the book, a call that has an id goes on in pieces without one.
    if _is_renamed(call, name) and (given is not None or call.id is None):
        return True
    return bool(arguments.strip()) and call.is_whole()


def _is_renamed(call: _Call, name: str) -> bool:
    return bool(name and call.name) and name != call.name


def _take_apart(piece: CallPiece) -> tuple[str | None, str, str]:
    """The id, name and arguments."""
    function = piece.function or Function()
    given = str(piece.id) if piece.id not in (None, "") else None
    return given, function.name or "", _write(function.arguments)


def _write(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _read(arguments: str) -> Any:
    """What they say; None if that is not JSON, or nested so deep that nobody can tell."""
    try:
        return read_json(arguments)
    except msgspec.DecodeError:
        return None
