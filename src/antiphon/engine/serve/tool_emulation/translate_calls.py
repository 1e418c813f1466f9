"""Translation of a backend's function call into the call that it emulates.

A call is emitted while it streams, or buffered until it is complete. An invalid call is not emitted.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from antiphon.engine.serve.answer_keys import Key
from antiphon.engine.serve.tool_emulation.catalog import CatalogEntry
from antiphon.engine.serve.tool_emulation.client_tools import make_call_item
from antiphon.engine.serve.tool_emulation.freeform import FreeformReader, strip_fence, unwrap_json
from antiphon.engine.serve.tool_emulation.grammar import explain_mismatch
from antiphon.protocol.json_text import read_json
from antiphon.protocol.tools import CustomTool, GrammarInput
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

_ACCEPTED = "The call was taken. Its result comes later."


class CallTranslator(Protocol):
    """The translator of one call. Its methods return the deltas that can be emitted now."""

    @property
    def fault(self) -> str | None:
        """The reason why the call is invalid."""

    @property
    def reply(self) -> str:
        """The output of the call for the model, if the backend is called again."""

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]: ...

    def write(self, fragment: str) -> Sequence[Delta]: ...

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]: ...


class FunctionCallTranslator:
    """A call of a function: only its name may change."""

    fault = None
    reply = _ACCEPTED

    def __init__(self, key: Key, client_name: tuple[str, str | None] | None) -> None:
        self._key = key
        self._client_name = client_name

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        name, namespace = self._client_name or (first.name, first.namespace)
        return [msgspec.structs.replace(first, key=self._key, name=name, namespace=namespace)]

    def write(self, fragment: str) -> Sequence[Delta]:
        return [deltas.ToolCall(self._key, fragment)]

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]:
        return []


class DroppedCallTranslator:
    """A call that is not allowed: it is not emitted."""

    fault = None
    reply = "The call was not carried out: it may not be made now."

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        return []

    def write(self, fragment: str) -> Sequence[Delta]:
        return []

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]:
        return []


class CustomCallTranslator:
    """A call of a custom tool without a grammar: its text is emitted while it streams."""

    fault = None
    reply = _ACCEPTED

    def __init__(self, key: Key, entry: CatalogEntry) -> None:
        self._key = key
        self._entry = entry
        self._reader = FreeformReader()

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        text = self._reader.feed(first.arguments)
        return [_make_custom_call(self._key, self._entry, text, first.call_id)]

    def write(self, fragment: str) -> Sequence[Delta]:
        text = self._reader.feed(fragment)
        return [deltas.CustomToolCall(self._key, text)] if text else []

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]:
        text, self._reader = self._reader.close(), FreeformReader()  # a second call returns none
        return [deltas.CustomToolCall(self._key, text)] if text else []


class BufferedCallTranslator:
    """A call that is emitted when it is complete and valid."""

    def __init__(self, key: Key, entry: CatalogEntry) -> None:
        self._key = key
        self._entry = entry
        self._fragments: list[str] = []
        self._checked = 0  # the number of fragments that are not a complete object
        self.call_id: str | None = None
        self._closed = False
        self.fault: str | None = None
        self.reply = _ACCEPTED

    def begin(self, first: deltas.ToolCall) -> Sequence[Delta]:
        self.call_id = first.call_id
        self._fragments.append(first.arguments)
        return []

    def write(self, fragment: str) -> Sequence[Delta]:
        if self._closed and fragment.strip():
            return [deltas.Failure("The model continued a closed call.", "model_error", "model_error")]
        self._fragments.append(fragment)
        return []

    def is_complete(self) -> bool:
        """Return True if the arguments are a complete JSON object. Free text is never known to be complete."""
        if len(self._fragments) == self._checked:  # this runs for every delta of a text
            return False
        self._checked = len(self._fragments)
        try:
            return isinstance(read_json("".join(self._fragments)), dict)
        except msgspec.DecodeError:
            return False

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]:
        """Return the call's deltas. A second call returns none."""
        if self._closed:
            return []
        self._closed = True
        arguments = "".join(self._fragments)
        tool = self._entry.tool
        if isinstance(tool, CustomTool):
            return self._close_custom(tool, arguments, is_cut_off=is_cut_off)
        try:
            item = make_call_item(tool, parse_arguments(arguments), self.call_id or "")
        except msgspec.MsgspecError as error:
            self.fault = str(error)
            return []
        return [deltas.WholeItem(item)]

    def _close_custom(self, tool: CustomTool, arguments: str, *, is_cut_off: bool) -> Sequence[Delta]:
        reader = FreeformReader()
        text = reader.feed(arguments) + reader.close()
        if is_cut_off:
            return [_make_custom_call(self._key, self._entry, text, self.call_id)]
        assert isinstance(tool.format, GrammarInput)
        fault = explain_mismatch(text, tool.format)
        if fault is None:
            return [_make_custom_call(self._key, self._entry, text, self.call_id)]
        for bare in (unwrap_json(text), strip_fence(text), unwrap_json(strip_fence(text))):
            if bare != text and explain_mismatch(bare, tool.format) is None:
                return [_make_custom_call(self._key, self._entry, bare, self.call_id)]
        self.fault = fault
        return []


class SearchCallTranslator(BufferedCallTranslator):
    """A tool search that this server runs: it is emitted together with its result."""

    arguments: object = None

    def close(self, *, is_cut_off: bool) -> Sequence[Delta]:
        try:
            self.arguments = parse_arguments("".join(self._fragments))
        except msgspec.MsgspecError as error:
            self.fault = str(error)
        return []


def parse_arguments(text: str) -> object:
    """Decode the arguments of a call. Empty text stands for no arguments."""
    arguments: object = read_json(text) if text.strip() else {}
    return arguments


def _make_custom_call(key: Key, entry: CatalogEntry, text: str, call_id: str | None) -> deltas.CustomToolCall:
    return deltas.CustomToolCall(key, text, entry.key.name, call_id, entry.key.namespace)
