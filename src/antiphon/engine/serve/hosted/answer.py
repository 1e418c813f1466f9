"""One answer of the model within a response: separates the calls of hosted functions from the client's deltas."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from antiphon.engine.items import CALL_TYPES
from antiphon.engine.serve.answer_keys import Key, rename_key
from antiphon.engine.serve.hosted.journal import CallRecord
from antiphon.engine.serve.hosted.toolset import HostedToolset
from antiphon.engine.serve.tool_emulation.catalog import is_legal_name
from antiphon.protocol.hosted import McpApprovalRequest, ToolSearchCall
from antiphon.protocol.response import Usage
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta
from antiphon.tools.hosted.base import HostedCall, HostedSession, TextFilter

# The name of a call in the context of the next model call, if upstreams would refuse its own.
_ILLEGAL_NAME = "unknown"
# Deltas that may come between two pieces of one message.
_BETWEEN_TEXT = (deltas.Annotate, deltas.TokenUsage, deltas.Served, deltas.Passthrough, deltas.Amend)


class CallBudget:
    """The hosted calls that a response may still make."""

    def __init__(self, limit: int, reason: str) -> None:
        self._left = limit
        self._refusal = f"The call was not carried out: {reason}. Answer now, without it."

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def take(self) -> str | None:
        """Count a call. Return the reason if it may not be made."""
        if self.is_spent:
            return self._refusal
        self._left -= 1
        return None

    def give_back(self) -> None:
        """Do not count a call that was not executed."""
        self._left += 1


class AnswerCall:
    """A call of a hosted function in an answer. `call` is None if the call is refused.

    `is_interrupted`: an earlier attempt has begun to run it. `is_repeatable` is then what the call itself declared.
    `has_written`: the call has its arguments already.
    """

    def __init__(
        self,
        record: CallRecord,
        call: HostedCall | None,
        *,
        is_interrupted: bool = False,
        is_repeatable: bool = False,
        has_written: bool = False,
    ) -> None:
        self.record = record
        self.call = call
        self.is_interrupted = is_interrupted
        self.is_repeatable = is_repeatable
        self.has_written = has_written
        self._fragments: list[str] = []

    def write(self, fragment: str, *, is_live: bool) -> Sequence[Delta]:
        self._fragments.append(fragment)
        if self.call is None or not is_live:
            return ()
        self.has_written = True
        written = self.call.write(fragment)
        self.record.is_open |= bool(written)
        return written

    def complete(self) -> CallRecord:
        """Return the record with all arguments. Some models write nothing if there are none."""
        self.record.arguments = "".join(self._fragments) or "{}"
        return self.record


class AnswerReader:
    """Reads one answer. `feed` returns the deltas for the client; the other attributes are complete after the last.

    `finish` is the end of the answer, which is not forwarded. `awaits_client`: the answer has a call that the client
    has to reply to. `number` is the number of the answer within the response.
    """

    def __init__(
        self,
        toolset: HostedToolset,
        number: int,
        budget: CallBudget,
        *,
        spent: Usage | None,
        filters_text: bool,
    ) -> None:
        self.calls: list[AnswerCall] = []
        self.finish: deltas.Finish | None = None
        self.has_failed = False
        self.awaits_client = False
        self.usage = spent
        self._toolset = toolset
        self._number = number
        self._budget = budget
        self._spent = spent
        self._filters_text = filters_text
        self._filters: list[TextFilter] | None = None
        self._hosted: dict[Key, AnswerCall] = {}
        self._forwarded: dict[Key, None] = {}
        self._unnamed: dict[Key, list[deltas.ToolCall]] = {}

    def feed(self, batch: Sequence[Delta]) -> list[Delta]:
        output: list[Delta] = []
        for delta in batch:
            if self._filters is not None and not isinstance(delta, (deltas.Text, *_BETWEEN_TEXT)):
                output += self._close_text()
            handler = self._HANDLERS.get(type(delta))
            if handler is not None:
                output += handler(self, delta)
            else:
                output.append(rename_key(delta, self._number))
        return output

    def list_records(self) -> list[CallRecord]:
        return [call.complete() for call in self.calls]

    def close_items(self) -> list[Delta]:
        """Return the deltas that close the client's calls and the text, before hosted calls are run."""
        return [*(rename_key(deltas.CloseItem(key), self._number) for key in self._forwarded), deltas.CloseItem()]

    # Calls

    def _tool_call(self, delta: deltas.ToolCall) -> Sequence[Delta]:
        if delta.key in self._forwarded:
            return [rename_key(delta, self._number)]
        call = self._hosted.get(delta.key)
        if call is not None:
            return self._write(call, delta.arguments)
        held = self._unnamed.setdefault(delta.key, [])
        held.append(delta)
        if not delta.name:  # the tool is not known yet
            return []
        del self._unnamed[delta.key]
        found = self._toolset.find(delta.name, delta.namespace)
        refusal = self._toolset.find_refusal(delta.name) if found is None else None
        if refusal is not None:
            name = delta.name if is_legal_name(delta.name) else _ILLEGAL_NAME
            call = self._hosted[delta.key] = self._refuse(name, refusal)
            call.record.call_id = delta.call_id
            return self._write(call, "".join(each.arguments for each in held))
        if found is None:
            self._forwarded[delta.key] = None
            self.awaits_client = True
            return [rename_key(each, self._number) for each in held]
        name = self._toolset.get_function_name(delta.name, delta.namespace)
        call = self._hosted[delta.key] = self._begin(name, *found)
        call.record.call_id = next((each.call_id for each in held if each.call_id), None)
        return self._write(call, "".join(each.arguments for each in held))

    def _begin(self, function: str, session: HostedSession, name: str) -> AnswerCall:
        key = f"hosted_{self._number}_{len(self.calls)}"
        refusal = self._budget.take()
        record = CallRecord(key=key, name=function, arguments="", refusal=refusal)
        call = AnswerCall(record, None if refusal is not None else session.begin(name, key))
        self.calls.append(call)
        return call

    def _refuse(self, function: str, reason: str) -> AnswerCall:
        record = CallRecord(key=f"hosted_{self._number}_{len(self.calls)}", name=function, arguments="", refusal=reason)
        call = AnswerCall(record, None)
        self.calls.append(call)
        return call

    def _write(self, call: AnswerCall, fragment: str) -> Sequence[Delta]:
        # The calls are run one after the other, so only the first one can stream its arguments.
        is_live = next((each for each in self.calls if each.call is not None), None) is call
        return call.write(fragment, is_live=is_live) if fragment else ()

    def _custom_call(self, delta: deltas.CustomToolCall) -> Sequence[Delta]:
        self.awaits_client = True
        return [rename_key(delta, self._number)]

    def _item(self, delta: deltas.WholeItem | deltas.OpenItem) -> Sequence[Delta]:
        item = delta.item
        if isinstance(item, ToolSearchCall):
            self.awaits_client |= item.call_id is not None
            if item.call_id is None:
                self._budget.take()  # a search of the server counts as a hosted call
        else:
            self.awaits_client |= isinstance(item, (*CALL_TYPES, McpApprovalRequest))
        return [rename_key(delta, self._number)]

    # Text, usage and the end

    def _text(self, delta: deltas.Text) -> Sequence[Delta]:
        if not self._filters_text:
            return [delta]
        if self._filters is None:
            opened = (each.session.open_text() for each in self._toolset)
            self._filters = [text_filter for text_filter in opened if text_filter is not None]
        return _pass(self._filters, [delta])

    def _close_text(self) -> list[Delta]:
        filters, self._filters = self._filters or [], None
        output: list[Delta] = []
        for index, text_filter in enumerate(filters):
            output += _pass(filters[index + 1 :], text_filter.close())
        return output

    def _tokens(self, delta: deltas.TokenUsage) -> Sequence[Delta]:
        self.usage = delta.usage if self._spent is None else self._spent + delta.usage
        return [deltas.TokenUsage(self.usage, delta.is_open)]

    def _end(self, delta: deltas.Finish) -> Sequence[Delta]:
        self.finish = delta
        return [rename_key(each, self._number) for held in self._unnamed.values() for each in held]

    def _fail(self, delta: deltas.Failure) -> Sequence[Delta]:
        self.has_failed = True
        return [delta]

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Delta]]]] = {
        deltas.ToolCall: _tool_call,
        deltas.CustomToolCall: _custom_call,
        deltas.WholeItem: _item,
        deltas.OpenItem: _item,
        deltas.Text: _text,
        deltas.TokenUsage: _tokens,
        deltas.Finish: _end,
        deltas.Failure: _fail,
    }


def _pass(filters: Sequence[TextFilter], pieces: Sequence[Delta]) -> list[Delta]:
    """Return text after it has passed the filters. Annotations pass unchanged."""
    passed = list(pieces)
    for text_filter in filters:
        passed = [each for piece in passed for each in _filter(text_filter, piece)]
    return passed


def _filter(text_filter: TextFilter, piece: Delta) -> Sequence[Delta]:
    if not isinstance(piece, deltas.Text):
        return [piece]
    filtered = text_filter.feed(piece.text)
    # Log probabilities belong to the text as the model wrote it.
    return [piece] if list(filtered) == [deltas.Text(piece.text)] else filtered
