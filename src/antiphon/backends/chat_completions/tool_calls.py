"""Assembly of tool calls from their parts.

By the specification, each part has the index of its call, and the first one the id and the name. Real servers omit the
index or repeat it for every call, omit ids, send a new id with every part, use one id for two calls, repeat the name,
and send all calls again at the end. A repeated call has the same name and arguments. Everything else is another call,
whatever its id.

A name may come in parts, too. One that can be the start of another tool's name is held until arguments or another call
follow.

Some servers send `{}` before the arguments of a call. It is held until the arguments replace it, or the answer ends. If
the tool has no required arguments, the next call ends it, too: clients that read one call at a time need the end of a
call before the next one.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.backends.chat_completions.wire import Function, ToolCallDelta
from antiphon.protocol.json_text import read_json
from antiphon.protocol.tools import FunctionTool, Tools
from antiphon.stream.deltas import ToolCall
from antiphon.stream.limits import AnswerLimits

_EMPTY_OBJECT = re.compile(r"\s*\{\s*\}\s*")


class _ToolNames:
    """The names of a request's tools. They are read at the first look-up, which most answers do not need."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._sorted: list[str] | None = None
        self._without_required: set[str] | None = None

    def may_lack_arguments(self, name: str) -> bool:
        """Return True if a tool has this name and no required arguments."""
        if self._without_required is None:
            functions = [tool for tool in self._tools or () if isinstance(tool, FunctionTool)]
            self._without_required = {tool.name for tool in functions if not (tool.parameters or {}).get("required")}
        return name in self._without_required

    def has(self, name: str) -> bool:
        names = self._sort()
        index = bisect_left(names, name)
        return index < len(names) and names[index] == name

    def has_longer(self, name: str) -> bool:
        """Return True if another name begins with this one."""
        names = self._sort()
        index = bisect_right(names, name)
        return index < len(names) and names[index].startswith(name)

    def _sort(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(tool.name for tool in self._tools or () if isinstance(tool, FunctionTool))
        return self._sorted


class _Call:
    """A call in progress."""

    def __init__(self, key: int, given: str | None, names: _ToolNames) -> None:
        self.key = key
        self.id = given
        self.call_id: str | None = None
        self.name = ""
        self.is_named = False  # a delta has the name
        self._names = names
        self.arguments: list[str] = []  # with the held text
        self.held = ""  # the end of an empty object, which may precede the arguments
        self._start: str | None = ""  # "", "{" or "{}" while the arguments may begin with an empty object
        self.is_settled = False

    @property
    def lacks_arguments(self) -> bool:
        """Return True if an empty object is held, and the tool requires arguments, as far as is known."""
        return bool(self.held) and not self._names.may_lack_arguments(self.name)

    @property
    def is_empty(self) -> bool:
        return not any(piece.strip() for piece in self.arguments)

    def is_whole(self) -> bool:
        last = next((piece for piece in reversed(self.arguments) if piece.strip()), "")
        return last.rstrip().endswith("}") and _parse("".join(self.arguments)) is not None

    def find_rest(self, name: str, arguments: str) -> str | None:
        """Return the rest of a whole call beyond this one, or None if it is another call."""
        received = "".join(self.arguments)
        if name != self.name:
            return None
        arguments = _drop_empty_object(arguments)
        if arguments.startswith(received):
            return arguments[len(received) :]
        parsed = _parse(received)
        if parsed is not None and parsed == _parse(arguments):
            return ""
        return arguments if self.held and arguments.startswith("{") else None

    def continues_with(self, name: str) -> bool:
        """Return True if this is the next part of a held name."""
        if not self.name or not name:
            return False
        joined = self.name + name
        return self._names.has(joined) or self._names.has_longer(joined)

    def add(self, name: str, arguments: str) -> ToolCall | None:
        new_name = "" if self.is_named else self._add_name(name, has_arguments=bool(arguments))
        if not new_name and not arguments:
            return None
        self.is_settled = False
        if self._start is None or not arguments:
            self.arguments.append(arguments)
        else:
            arguments = self._add_start(self._start, arguments)
        return ToolCall(self.key, arguments, new_name, self.call_id) if new_name or arguments else None

    def _add_start(self, start: str, fragment: str) -> str:
        """Add a fragment to arguments that may begin with an empty object. Return the text to emit."""
        text = start + fragment
        found = None if text.startswith('{"') else _EMPTY_OBJECT.match(text)  # the most frequent start needs no search
        if found is None:
            stripped = text.strip()
            self._start = stripped if stripped in ("", "{") else None
            self.arguments.append(fragment)
            return fragment
        has_brace = start == "{" or self.held == "}"  # the client has the brace of the empty object
        if self.held:
            self.arguments.pop()
        if found.end() == len(text):
            self._start, self.held = "{}", "}" if has_brace else "{}"
            self.arguments.append(self.held)
            return ""
        rest = text[found.end() :]
        if rest.startswith("{"):
            emitted = rest[1:] if has_brace else rest
        else:
            emitted = self.held + fragment
        self._start, self.held = None, ""
        self.arguments.append(emitted)
        return emitted

    def release(self) -> Sequence[ToolCall]:
        """Return the delta with the held text, if there is any."""
        if not self.held:
            return ()
        held, self.held, self._start = self.held, "", None
        return (ToolCall(self.key, held, "", self.call_id),)

    def _add_name(self, name: str, *, has_arguments: bool) -> str:
        """Return the whole name, or nothing if it is still held."""
        self.name = self.name + name if self.continues_with(name) else self.name or name
        self.is_named = bool(self.name) and (has_arguments or not self._names.has_longer(self.name))
        return self.name if self.is_named else ""


class ToolCallAssembler:
    """Assembles the tool calls of one answer. Raises an error if it has more calls than `limits` permit items.

    `tools` are those of the request.
    """

    def __init__(self, limits: AnswerLimits, tools: Tools | None = None) -> None:
        self._limits = limits
        self._names = _ToolNames(tools)
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._unnamed: _Call | None = None  # the call whose name is held

    def __bool__(self) -> bool:
        return bool(self._calls)

    def read(self, part: ToolCallDelta) -> Sequence[ToolCall]:
        """Return the deltas for a part: its own, unless it adds nothing, after the held name of another call."""
        given, name, arguments = _unpack(part)
        call = self._find(part.index, given, name, arguments)
        if call is None:
            if given is None and not name and not arguments:
                return ()
            has_new_index = part.index is not None and part.index not in self._by_index
            if not has_new_index and given in self._by_id and self._has_received(given, name, arguments):
                return ()
            ended = self._release_last()
            call = self._begin(part.index, given)
        else:
            ended = ()
        released = () if self._unnamed is None or self._unnamed is call else self.release_name()
        delta = call.add(name, arguments)
        if delta is None:
            self._unnamed = None if call.is_named else call
            return (*ended, *released)
        return (*ended, *released, delta)

    def release(self) -> Sequence[ToolCall]:
        """Return the deltas with the held name and the held arguments."""
        return [*self.release_name(), *(delta for call in self._calls for delta in call.release())]

    def _release_last(self) -> Sequence[ToolCall]:
        """Return the delta with the held arguments of the last call, if they can be all that it has."""
        last = self._calls[-1] if self._calls else None
        return last.release() if last is not None and last.held and self._names.may_lack_arguments(last.name) else ()

    def release_name(self) -> Sequence[ToolCall]:
        """Return the delta with the held name, if there is one."""
        call, self._unnamed = self._unnamed, None
        if call is None or call.is_named or not call.name:
            return ()
        call.is_named = True
        return (ToolCall(call.key, "", call.name, call.call_id),)

    def add_missing(self, parts: Sequence[ToolCallDelta]) -> list[ToolCall]:
        """Return the deltas that a list of all calls adds to the parts received before. Their names are whole."""
        deltas: list[ToolCall | None] = [*self.release_name()]
        remaining = list(self._calls)
        for part in parts:
            given, name, arguments = _unpack(part)
            if given is None and not name and not arguments:
                continue
            for call in remaining:
                rest = call.find_rest(name, arguments)
                if rest == "" or (rest is not None and (given is None or call.id in (None, given))):
                    remaining.remove(call)
                    deltas.append(call.add("", rest))
                    break
            else:
                deltas += self._release_last()
                call = self._unnamed = self._begin(None, given)
                deltas += (call.add(name, arguments), *self.release_name(), *call.release())
        return [delta for delta in deltas if delta is not None]

    def find_id(self, part: ToolCallDelta) -> str | None:
        """Return the id of the latest call with the part's index or id."""
        given = _unpack(part)[0]
        call = self._by_id.get(given) if given is not None else None
        if call is None and part.index is not None:
            call = self._by_index.get(part.index)
        if call is None and self._calls:
            call = self._calls[-1]
        return call.call_id if call is not None else given

    def settle(self) -> None:
        """Mark all calls so far as finished by the model."""
        for call in self._calls:
            call.is_settled = True

    def has_incomplete(self) -> bool:
        """Return True if an unfinished call has incomplete arguments."""
        return any(not call.is_settled and not call.is_whole() for call in self._calls)

    def fill_empty(self) -> list[ToolCall]:
        """Return `{}` as the arguments of calls without any: clients expect an object."""
        return [ToolCall(call.key, "{}") for call in self._calls if call.is_empty]

    def _find(self, index: int | None, given: str | None, name: str, arguments: str) -> _Call | None:
        if index is not None:
            call = self._by_index.get(index)
        elif given is not None:
            call = self._by_id.get(given)
        else:
            call = self._calls[-1] if self._calls else None
        if call is None:
            return None
        if not call.is_named and given in (None, call.id) and call.continues_with(name):
            return call
        if index is None and given is None and _is_renamed(call, name):
            return None
        return None if _is_other(call, given, name, arguments) else call

    def _has_received(self, given: str | None, name: str, arguments: str) -> bool:
        return any(call.id == given and call.find_rest(name, arguments) == "" for call in self._calls)

    def _begin(self, index: int | None, given: str | None) -> _Call:
        if len(self._calls) >= self._limits.max_answer_items:
            raise self._limits.make_error("max_answer_items")
        call = _Call(len(self._calls), given, self._names)
        self._calls.append(call)
        if given is not None:
            if given not in self._by_id:  # a repeated id is replaced by a new one
                call.call_id = given
            self._by_id[given] = call
        if index is not None:
            self._by_index[index] = call
        return call


def _is_other(call: _Call, given: str | None, name: str, arguments: str) -> bool:
    """Return True if a part for this call's index or id begins another call. Only a part with a name can."""
    if not name:
        return False
    if given is not None and call.id is not None and given != call.id:
        return True
    # By the specification, further parts of a call with an id have none.
    if _is_renamed(call, name) and (given is not None or call.id is None):
        return True
    if given is not None and call.lacks_arguments:
        return False
    return bool(arguments.strip()) and call.is_whole()


def _is_renamed(call: _Call, name: str) -> bool:
    return bool(name and call.name) and name != call.name


def _unpack(part: ToolCallDelta) -> tuple[str | None, str, str]:
    """Return the id, name and arguments of a part."""
    function = part.function or Function()
    given = str(part.id) if part.id not in (None, "") else None
    return given, function.name or "", _encode(function.arguments)


def _encode(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _drop_empty_object(arguments: str) -> str:
    """Remove an empty object that another object follows."""
    found = _EMPTY_OBJECT.match(arguments)
    return arguments[found.end() :] if found is not None and arguments.startswith("{", found.end()) else arguments


def _parse(arguments: str) -> Any:
    """Decode arguments. Return None if they are not JSON, or nested too deeply."""
    try:
        return read_json(arguments)
    except msgspec.DecodeError:
        return None
