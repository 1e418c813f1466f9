"""What a backend says in answer to a lowered turn, raised to what the client asked for."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from antiphon.engine.serve.tool_emulation.follow_up import AnswerRecord, TurnBudget, decide_follow_up, take_commentary
from antiphon.engine.serve.tool_emulation.translate_calls import (
    BufferedCallTranslator,
    CallTranslator,
    CustomCallTranslator,
    DroppedCallTranslator,
    FunctionCallTranslator,
    Key,
    SearchCallTranslator,
)
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.engine.serve.tool_emulation.translate_request import TranslatedTurn
from antiphon.protocol.tools import CustomTool, GrammarInput, ToolSearchTool
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

logger = logging.getLogger(__name__)


class AnswerTranslator:
    """One answer of the backend. After its end, `following` are the items to ask it again with, if it must be."""

    def __init__(self, lowered: TranslatedTurn, budget: TurnBudget) -> None:
        self.following: Items | None = None
        self._lowered = lowered
        self._budget = budget
        self._number = budget.rounds
        self._before = budget.spent
        self._said = AnswerRecord(self._number)
        self._open: dict[Key, BufferedCallTranslator] = {}
        self._unnamed: dict[Key, list[deltas.ToolCall]] = {}
        self._muted: set[Key] = set()
        budget.rounds += 1

    def feed(self, batch: Iterable[Delta]) -> list[Delta]:
        """What the client is told of these deltas."""
        told: list[Delta] = []
        for delta in batch:
            handler = self._HANDLERS.get(type(delta))
            if handler is None:
                self._said.heard.append(delta)
                told.append(delta)
            else:
                told += handler(self, delta)
        return told

    # Words

    def _text(self, delta: deltas.Text) -> Sequence[Delta]:
        self._said.heard.append(delta)
        if self._lowered.check is None:
            return [*self._settle(), delta] if self._open else [delta]
        self._said.answer.append(delta.text)
        return []

    def _annotate(self, delta: deltas.Annotate) -> Sequence[Delta]:
        if self._lowered.check is None:
            return [delta]
        self._said.notes.append(delta)
        return []

    def _refusal(self, delta: deltas.Refusal) -> Sequence[Delta]:
        self._said.refused = True
        self._said.heard.append(delta)
        return [delta]

    def _tokens(self, delta: deltas.TokenUsage) -> Sequence[Delta]:
        return [deltas.TokenUsage(self._budget.spend(delta.usage, self._before))]

    # Calls

    def _tool_call(self, delta: deltas.ToolCall) -> Sequence[Delta]:
        self._said.heard.append(delta)
        call = self._said.calls.get(delta.key)
        if call is not None:
            return call.write(delta.arguments) if delta.arguments else []
        held = self._unnamed.setdefault(delta.key, [])
        held.append(delta)
        if not delta.name:  # which tool is meant is not known yet
            return []
        del self._unnamed[delta.key]
        first = deltas.ToolCall(
            delta.key,
            "".join(each.arguments for each in held),
            delta.name,
            next((each.call_id for each in held if each.call_id), None),
            delta.namespace,
        )
        told = [*self._settle(), *take_commentary(self._said)]
        call = self._said.calls[delta.key] = self._make_call(first)
        if isinstance(call, BufferedCallTranslator):
            self._open[delta.key] = call
        return [*told, *call.begin(first)]

    def _make_call(self, first: deltas.ToolCall) -> CallTranslator:
        entry = self._lowered.catalog.find(first.name)
        if not self._admits(entry.name if entry is not None else first.name):
            return DroppedCallTranslator()
        key = self._rename(first.key)
        if entry is None or entry.tool.type == "function":
            return FunctionCallTranslator(key, None if entry is None else self._lowered.catalog.address(entry))
        if isinstance(entry.tool, ToolSearchTool) and entry.tool.execution != "client":
            return SearchCallTranslator(key, entry)
        if isinstance(entry.tool, CustomTool) and not isinstance(entry.tool.format, GrammarInput):
            return CustomCallTranslator(key, entry)
        return BufferedCallTranslator(key, entry)

    def _admits(self, name: str) -> bool:
        limits = self._lowered.limits
        if limits.allowed is not None and name not in limits.allowed:
            logger.warning("the model called '%s', which is not allowed now: the call was left out", name)
            return False
        if limits.most_calls is not None and self._budget.calls >= limits.most_calls:
            logger.warning("the model called '%s' beyond the calls it may make: the call was left out", name)
            return False
        self._budget.calls += 1
        return True

    def _custom_call(self, delta: deltas.CustomToolCall) -> Sequence[Delta]:
        """From a backend that has custom tools itself: only the name may be another."""
        entry = self._lowered.catalog.find(delta.name) if delta.name else None
        if delta.name and not self._admits(entry.name if entry is not None else delta.name):
            self._muted.add(delta.key)
        if delta.key in self._muted:
            return []
        self._said.heard.append(delta)
        self._said.has_custom = True
        changes: dict[str, Any] = {"key": self._rename(delta.key)}
        if entry is not None:
            changes |= {"name": entry.identity.name, "namespace": entry.identity.namespace}
        return [*self._settle(), *take_commentary(self._said), msgspec.structs.replace(delta, **changes)]

    def _rename(self, key: Key) -> Key:
        """Each round counts its calls anew."""
        return key if self._number == 0 else f"{self._number} {key}"

    def _settle(self) -> list[Delta]:
        """Tell the held calls that are whole before something else is told."""
        told: list[Delta] = []
        for key in [key for key, call in self._open.items() if call.is_whole()]:
            told += self._open.pop(key).close(cut=False)
        return told

    def _finish(self, delta: deltas.Finish) -> Sequence[Delta]:
        cut = delta.reason != "stop"
        told = [each for call in self._said.calls.values() for each in call.close(cut=cut)]
        if cut and any(call.fault is not None for call in self._said.calls.values()):
            logger.warning("a tool call was cut off and left out")
        told += [each for held in self._unnamed.values() for each in held]
        ending = decide_follow_up(self._said, delta, self._lowered, self._budget)
        self.following = ending.following
        return [*told, *ending.told]

    _HANDLERS: ClassVar[dict[type, Callable[..., Sequence[Delta]]]] = {
        deltas.Text: _text,
        deltas.Annotate: _annotate,
        deltas.Refusal: _refusal,
        deltas.TokenUsage: _tokens,
        deltas.ToolCall: _tool_call,
        deltas.CustomToolCall: _custom_call,
        deltas.Finish: _finish,
    }
