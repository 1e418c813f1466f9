"""A function call of the model on its way back to the call it stands for: told as it comes, or held until it is whole.

`begin` and `write` give what can be told at once, `close` the rest. A call that makes no sense tells nothing: its
`fault` says why. `reply` is what the model hears of the call if it must be asked again.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import CatalogEntry
from antiphon.engine.serve.tool_emulation.client_tools import make_call_item
from antiphon.engine.serve.tool_emulation.freeform import FreeformReader, strip_fence, unwrap
from antiphon.engine.serve.tool_emulation.grammar import explain_mismatch
from antiphon.protocol.json_text import read_json
from antiphon.protocol.tools import CustomTool, GrammarInput
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

Key = int | str
_TAKEN = "The call was taken. Its result comes later."


class CallTranslator(Protocol):
    @property
    def fault(self) -> str | None: ...

    @property
    def reply(self) -> str: ...

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]: ...

    def write(self, fragment: str) -> Sequence[Delta]: ...

    def close(self, *, cut: bool) -> Sequence[Delta]: ...


class FunctionCallTranslator:
    """A function's call stays one; only its name may be another."""

    fault = None
    reply = _TAKEN

    def __init__(self, key: Key, address: tuple[str, str | None] | None) -> None:
        self._key = key
        self._address = address

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        name, namespace = self._address or (first.name, first.namespace)
        return [deltas.ToolCall(self._key, first.arguments, name, first.call_id, namespace)]

    def write(self, fragment: str) -> Sequence[Delta]:
        return [deltas.ToolCall(self._key, fragment)]

    def close(self, *, cut: bool) -> Sequence[Delta]:
        return []


class DroppedCallTranslator:
    """A call that must not be: nobody hears of it."""

    fault = None
    reply = "The call was not carried out: it may not be made now."

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        return []

    def write(self, fragment: str) -> Sequence[Delta]:
        return []

    def close(self, *, cut: bool) -> Sequence[Delta]:
        return []


class CustomCallTranslator:
    """A custom tool's call whose text is told as it comes."""

    fault = None
    reply = _TAKEN

    def __init__(self, key: Key, entry: CatalogEntry) -> None:
        self._key = key
        self._entry = entry
        self._reader = FreeformReader()

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        text = self._reader.feed(first.arguments)
        return [_tell_custom(self._key, self._entry, text, first.call_id)]

    def write(self, fragment: str) -> Sequence[Delta]:
        text = self._reader.feed(fragment)
        return [deltas.CustomToolCall(self._key, text)] if text else []

    def close(self, *, cut: bool) -> Sequence[Delta]:
        text = self._reader.close()
        return [deltas.CustomToolCall(self._key, text)] if text else []


class BufferedCallTranslator:
    """A call that is told when it is whole and found good."""

    def __init__(self, key: Key, entry: CatalogEntry) -> None:
        self._key = key
        self._entry = entry
        self._written: list[str] = []
        self.call_id: str | None = None
        self._closed = False
        self.fault: str | None = None
        self.reply = _TAKEN

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        self.call_id = first.call_id
        self._written.append(first.arguments)
        return []

    def write(self, fragment: str) -> Sequence[Delta]:
        self._written.append(fragment)
        return []

    def is_whole(self) -> bool:
        """Whether nothing more can come: free text is never known to be whole, but JSON is."""
        try:
            return isinstance(read_json("".join(self._written)), dict)
        except msgspec.DecodeError:
            return False

    def close(self, *, cut: bool) -> Sequence[Delta]:
        """A second time it tells nothing."""
        if self._closed:
            return []
        self._closed = True
        written = "".join(self._written)
        tool = self._entry.tool
        if isinstance(tool, CustomTool):
            return self._close_custom(tool, written, cut=cut)
        try:
            item = make_call_item(tool, read_arguments(written), self.call_id or "")
        except msgspec.MsgspecError as error:
            self.fault = str(error)
            return []
        return [deltas.WholeItem(item)]

    def _close_custom(self, tool: CustomTool, written: str, *, cut: bool) -> Sequence[Delta]:
        reader = FreeformReader()
        text = reader.feed(written) + reader.close()
        if cut:
            return [_tell_custom(self._key, self._entry, text, self.call_id)]
        assert isinstance(tool.format, GrammarInput)
        fault = explain_mismatch(text, tool.format)
        if fault is None:
            return [_tell_custom(self._key, self._entry, text, self.call_id)]
        for bare in (unwrap(text), strip_fence(text), unwrap(strip_fence(text))):
            if bare != text and explain_mismatch(bare, tool.format) is None:
                return [_tell_custom(self._key, self._entry, bare, self.call_id)]
        self.fault = fault
        return []


class SearchCallTranslator(BufferedCallTranslator):
    """A search that this server carries out: it is told together with what it finds."""

    arguments: object = None

    def close(self, *, cut: bool) -> Sequence[Delta]:
        try:
            self.arguments = read_arguments("".join(self._written))
        except msgspec.MsgspecError as error:
            self.fault = str(error)
        return []


def read_arguments(written: str) -> object:
    """The arguments of a call; a model that has none to give may write nothing."""
    arguments: object = read_json(written) if written.strip() else {}
    return arguments


def _tell_custom(key: Key, entry: CatalogEntry, text: str, call_id: str | None) -> deltas.CustomToolCall:
    return deltas.CustomToolCall(key, text, entry.identity.name, call_id, entry.identity.namespace)
