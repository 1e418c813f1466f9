"""Translation of a backend's answer to a translated turn back into the deltas that the client expects."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from antiphon.engine.serve.answer_keys import Key, make_key, rename_key
from antiphon.engine.serve.tool_emulation.answer_record import AnswerRecord, TurnBudget
from antiphon.engine.serve.tool_emulation.follow_up import decide_follow_up
from antiphon.engine.serve.tool_emulation.tool_choice import admit_call
from antiphon.engine.serve.tool_emulation.translate_calls import (
    BufferedCallTranslator,
    CallTranslator,
    CustomCallTranslator,
    DroppedCallTranslator,
    FunctionCallTranslator,
    SearchCallTranslator,
)
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.engine.serve.tool_emulation.translate_request import TranslatedTurn
from antiphon.protocol.tools import CustomTool, GrammarInput, ToolSearchTool
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

logger = logging.getLogger(__name__)


class AnswerTranslator:
    """Translates one answer of the backend.

    After its end, `next_items` are the items to call the backend with again, or None. `has_failed` is true after a
    failure that the backend did not report.
    """

    def __init__(self, translated: TranslatedTurn, budget: TurnBudget) -> None:
        self.next_items: Items | None = None
        self.has_failed = False
        self._translated = translated
        self._budget = budget
        self._number = budget.answers
        self._spent_before = budget.spent
        self._answer = AnswerRecord(self._number)
        self._buffered: dict[Key, BufferedCallTranslator] = {}
        self._unnamed: dict[Key, list[deltas.ToolCall]] = {}
        self._dropped: set[Key] = set()
        self._has_grammar_call = False
        budget.answers += 1

    def is_costly(self, batch: Sequence[Delta]) -> bool:
        """Return True if `feed` may match text against a grammar or a schema, which takes long for long text."""
        kinds = set(map(type, batch))
        if deltas.Finish in kinds:
            return self._translated.check is not None or self._has_grammar_call or deltas.ToolCall in kinds
        # Fragments of a call are only appended.
        return self._has_grammar_call and any(type(delta) is not deltas.ToolCall or delta.name for delta in batch)

    @property
    def has_search(self) -> bool:
        """True if the answer so far calls the tool search of the server."""
        return any(isinstance(call, SearchCallTranslator) for call in self._answer.calls.values())

    def feed(self, batch: Iterable[Delta]) -> list[Delta]:
        """Return the client's deltas for these deltas of the backend. A failure is the last one."""
        output: list[Delta] = []
        for delta in batch:
            if self.has_failed:
                break
            handler = self._HANDLERS.get(type(delta))
            if handler is None:
                self._answer.received.append(delta)
                output.append(rename_key(delta, self._number))
            else:
                output += handler(self, delta)
        return output

    # Text deltas

    def _text(self, delta: deltas.Text) -> Sequence[Delta]:
        self._answer.received.append(delta)
        if self._translated.check is None:
            return [*self._emit_complete_calls(), delta] if self._buffered else [delta]
        self._answer.held_text.append(delta.text)
        return []

    def _annotate(self, delta: deltas.Annotate) -> Sequence[Delta]:
        if self._translated.check is None:
            return [delta]
        self._answer.held_annotations.append(delta)
        return []

    def _refusal(self, delta: deltas.Refusal) -> Sequence[Delta]:
        self._answer.is_refusal = True
        self._answer.received.append(delta)
        return [delta]

    def _tokens(self, delta: deltas.TokenUsage) -> Sequence[Delta]:
        return [deltas.TokenUsage(self._budget.add_usage(delta.usage, self._spent_before), delta.is_open)]

    # Tool calls

    def _tool_call(self, delta: deltas.ToolCall) -> Sequence[Delta]:
        call = self._answer.calls.get(delta.key)
        if call is not None:
            if not delta.arguments:
                return []
            # A repeated name would begin another call in the record.
            self._answer.received.append(deltas.ToolCall(delta.key, delta.arguments))
            written = call.write(delta.arguments)
            self.has_failed = any(isinstance(each, deltas.Failure) for each in written)
            return written
        self._answer.received.append(delta)
        held = self._unnamed.setdefault(delta.key, [])
        held.append(delta)
        if not delta.name:  # the tool is not known yet
            return []
        del self._unnamed[delta.key]
        first = deltas.ToolCall(
            delta.key,
            "".join(each.arguments for each in held),
            delta.name,
            next((each.call_id for each in held if each.call_id), None),
            delta.namespace,
            has_end=delta.has_end,
        )
        output = [*self._emit_complete_calls(), *self._answer.take_commentary()]
        call = self._answer.calls[delta.key] = self._make_translator(first)
        if isinstance(call, BufferedCallTranslator):
            self._buffered[delta.key] = call
        return [*output, *call.begin(first)]

    def _make_translator(self, first: deltas.ToolCall) -> CallTranslator:
        entry = self._translated.catalog.find(first.name)
        if not self._admit_call(entry.name if entry is not None else first.name):
            return DroppedCallTranslator()
        key = make_key(first.key, self._number)
        if entry is None or entry.tool.type == "function":
            return FunctionCallTranslator(
                key, None if entry is None else self._translated.catalog.get_client_name(entry)
            )
        if isinstance(entry.tool, ToolSearchTool) and entry.tool.execution != "client":
            return SearchCallTranslator(key, entry)
        if isinstance(entry.tool, CustomTool) and not isinstance(entry.tool.format, GrammarInput):
            return CustomCallTranslator(key, entry)
        self._has_grammar_call |= isinstance(entry.tool, CustomTool)
        return BufferedCallTranslator(key, entry)

    def _admit_call(self, name: str) -> bool:
        return admit_call(name, self._translated.rules, self._budget)

    def _custom_call(self, delta: deltas.CustomToolCall) -> Sequence[Delta]:
        """Translate a call from a backend that supports custom tools: only the name may change."""
        entry = self._translated.catalog.find(delta.name) if delta.name else None
        if delta.name and not self._admit_call(entry.name if entry is not None else delta.name):
            self._dropped.add(delta.key)
        if delta.key in self._dropped:
            return []
        self._answer.received.append(delta)
        self._answer.has_custom_call = True
        changes: dict[str, Any] = {"key": make_key(delta.key, self._number)}
        if entry is not None:
            changes |= {"name": entry.key.name, "namespace": entry.key.namespace}
        return [
            *self._emit_complete_calls(),
            *self._answer.take_commentary(),
            msgspec.structs.replace(delta, **changes),
        ]

    def _close_item(self, delta: deltas.CloseItem) -> Sequence[Delta]:
        self._answer.received.append(delta)
        call = None if delta.key is None else self._answer.calls.get(delta.key)
        # The text of a custom call may be known only at its end.
        rest = call.close(is_cut_off=False) if isinstance(call, CustomCallTranslator) else ()
        return [*rest, rename_key(delta, self._number)]

    def _emit_complete_calls(self) -> list[Delta]:
        """Emit the buffered calls that are complete, before other deltas."""
        output: list[Delta] = []
        for key in [key for key, call in self._buffered.items() if call.is_complete()]:
            output += self._buffered.pop(key).close(is_cut_off=False)
        return output

    def _finish(self, delta: deltas.Finish) -> Sequence[Delta]:
        is_cut_off = delta.reason != "stop"
        output = [each for call in self._answer.calls.values() for each in call.close(is_cut_off=is_cut_off)]
        if is_cut_off and any(call.fault is not None for call in self._answer.calls.values()):
            logger.warning("dropped a tool call that was cut off")
        output += [each for held in self._unnamed.values() for each in held]
        follow_up = decide_follow_up(self._answer, delta, self._translated, self._budget)
        self.next_items = follow_up.next_items
        return [*output, *follow_up.output]

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Delta]]]] = {
        deltas.Text: _text,
        deltas.Annotate: _annotate,
        deltas.Refusal: _refusal,
        deltas.TokenUsage: _tokens,
        deltas.ToolCall: _tool_call,
        deltas.CustomToolCall: _custom_call,
        deltas.CloseItem: _close_item,
        deltas.Finish: _finish,
    }
