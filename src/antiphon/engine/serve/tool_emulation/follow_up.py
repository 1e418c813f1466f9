"""What follows when the backend has ended its answer: the end, another try, or a search and more."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from antiphon.engine.serve.tool_emulation.tool_search import group_by_namespace, search_tools
from antiphon.engine.serve.tool_emulation.translate_calls import (
    CallTranslator,
    DroppedCallTranslator,
    Key,
    SearchCallTranslator,
)
from antiphon.engine.serve.tool_emulation.translate_history import Items, describe_found_tools
from antiphon.engine.serve.tool_emulation.translate_request import TranslatedTurn
from antiphon.protocol.content import InputText
from antiphon.protocol.hosted import ToolSearchCall, ToolSearchOutput
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Message
from antiphon.protocol.response import Response, Usage
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Delta

MOST_SEARCHES = 8


class TurnBudget:
    """What is left. `searches` below zero: the model has gone on searching after the last one."""

    def __init__(self, *, most_searches: int | None = None, most_tokens: int | None = None) -> None:
        self._most_tokens = most_tokens
        self._most_searches = min(most_searches or MOST_SEARCHES, MOST_SEARCHES)
        self.retries = 1
        self.searches = self._most_searches
        self.calls = 0
        self.rounds = 0
        self.spent: Usage | None = None

    @property
    def has_called(self) -> bool:
        """Whether the model has called a tool that it may call, and rightly."""
        return self.calls > 0 or self.searches < self._most_searches

    def spend(self, usage: Usage, before: Usage | None) -> Usage:
        """The tokens of all rounds, when `before` is what the earlier ones took."""
        self.spent = usage if before is None else before + usage
        return self.spent

    def tokens_left(self) -> int | None:
        """How many tokens the next round may say; None if that was not limited."""
        if self._most_tokens is None or self.spent is None:
            return self._most_tokens
        return max(1, self._most_tokens - self.spent.output_tokens)


class AnswerRecord:
    """What a backend has said in one round: as it came, its calls, and the answer that is held back to be checked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.heard: list[Delta] = []
        self.calls: dict[Key, CallTranslator] = {}
        self.answer: list[str] = []
        self.notes: list[Delta] = []
        self.refused = False
        self.has_custom = False

    def list_items(self) -> Items:
        """What was said, as items that the backend can read again."""
        place = f"round{self.number}"
        numbers = iter(range(len(self.heard) + 1))
        composer = Composer(
            Response(id=place, created_at=0, model=""), new_id=lambda kind: f"{kind}_{place}_{next(numbers)}", now=int
        )
        composer.compose([*self.heard, deltas.Finish()])
        return composer.response.output


class FollowUp(msgspec.Struct, frozen=True):
    """What the client is told, and the items with which the backend is asked again, if it is."""

    told: Sequence[Delta]
    following: Items | None = None


def decide_follow_up(
    said: AnswerRecord, finish: deltas.Finish, lowered: TranslatedTurn, budget: TurnBudget
) -> FollowUp:
    if finish.reason != "stop":
        return FollowUp([*_say_answer(said), finish])
    faults = [call.fault for call in said.calls.values() if call.fault is not None]
    if faults:
        return _reject_calls(said, faults, budget)
    if any(isinstance(call, SearchCallTranslator) for call in said.calls.values()):
        return _search(said, finish, lowered, budget)
    if _is_forbidden(said) or (lowered.limits.must_call and not _has_called(said, budget)):
        return _reject_choice(said, lowered, budget)
    return _check_answer(said, finish, lowered, budget)


def _is_forbidden(said: AnswerRecord) -> bool:
    """Whether nothing was said but calls that may not be."""
    spoken = said.refused or said.has_custom or any(isinstance(each, deltas.Text) for each in said.heard)
    return (
        bool(said.calls) and not spoken and all(isinstance(call, DroppedCallTranslator) for call in said.calls.values())
    )


def _has_called(said: AnswerRecord, budget: TurnBudget) -> bool:
    """Whether a tool was called, here or by the backend itself: or the model has refused to say anything at all."""
    ran = any(isinstance(each, deltas.WholeItem | deltas.OpenItem) for each in said.heard)
    return budget.has_called or ran or said.refused


def _check_answer(said: AnswerRecord, finish: deltas.Finish, lowered: TranslatedTurn, budget: TurnBudget) -> FollowUp:
    has_calls = said.has_custom or any(not isinstance(call, DroppedCallTranslator) for call in said.calls.values())
    if lowered.check is None or said.refused or (has_calls and not said.answer):
        return FollowUp([*_say_answer(said), finish])
    text, faults = lowered.check.read("".join(said.answer))
    if not faults:
        said.answer = [text]
        return FollowUp([*_say_answer(said), finish])
    fault = "; ".join(faults)
    if not budget.retries:
        message = f"The model's answer is not what was asked for: {fault}"
        return FollowUp([deltas.Failure(message, "invalid_output", "model_error")])
    budget.retries -= 1
    return FollowUp([], request_correction(said, fault))


def request_correction(said: AnswerRecord, fault: str) -> Items:
    """What the model said for an answer, and what is wrong with that."""
    wish = InputText(f"This answer is not what was asked for: {fault}. Answer again, with nothing but the JSON.")
    return [*said.list_items(), Message("user", [wish], status="completed")]


def _say_answer(said: AnswerRecord) -> list[Delta]:
    text = "".join(said.answer)
    return [deltas.Text(text), *said.notes] if text else []


def take_commentary(said: AnswerRecord) -> list[Delta]:
    """Words before a call are no answer, so they need not be what an answer must be."""
    text, said.answer = "".join(said.answer), []
    if not text.strip():
        return []
    return [deltas.Phase("commentary"), deltas.Text(text), deltas.CloseItem()]


def _reject_calls(said: AnswerRecord, faults: Sequence[str], budget: TurnBudget) -> FollowUp:
    told = take_commentary(said)
    if not budget.retries:
        message = f"The model called a tool with what it does not take: {'; '.join(faults)}"
        return FollowUp([*told, deltas.Failure(message, "invalid_tool_input", "model_error")])
    budget.retries -= 1
    budget.calls -= len(faults)
    return FollowUp(told, _reply(said, lambda call: call.reply if call.fault is None else _ask_again(call.fault)))


_NOT_ALLOWED = deltas.Failure(
    "The model called nothing but tools that 'tool_choice' does not let it call.", "tool_not_allowed", "model_error"
)
_NOT_CALLED = deltas.Failure(
    "'tool_choice' requires a call, but the model made none.", "tool_not_called", "model_error"
)


def _reject_choice(said: AnswerRecord, lowered: TranslatedTurn, budget: TurnBudget) -> FollowUp:
    """Ask for a call that may be made. Words that came instead stay: they may well come before it."""
    told = [*take_commentary(said), deltas.CloseItem()]
    if not budget.retries:
        return FollowUp([*told, _NOT_ALLOWED if _is_forbidden(said) else _NOT_CALLED])
    budget.retries -= 1
    following = _reply(said, lambda call: call.reply)
    if lowered.limits.must_call:
        wanted = " or ".join(sorted(lowered.limits.allowed or ())) or "one of the tools"
        following.append(Message("user", [InputText(f"A call was asked for. Call {wanted} now.")], status="completed"))
    return FollowUp(told, following)


def _ask_again(fault: str) -> str:
    return (
        f"The call was not carried out, since its arguments are wrong: {fault}. Call the tool again, with right ones."
    )


def _search(said: AnswerRecord, finish: deltas.Finish, lowered: TranslatedTurn, budget: TurnBudget) -> FollowUp:
    """Carry out the searches and ask the model again: unless the client has a call to answer first."""
    told = take_commentary(said)
    for call in said.calls.values():
        if isinstance(call, SearchCallTranslator):
            told += _find(call, lowered, budget)
    others = said.has_custom or any(
        not isinstance(call, SearchCallTranslator | DroppedCallTranslator) for call in said.calls.values()
    )
    # A model that goes on searching when it may not any more is not asked for ever.
    if others or budget.searches < -1:
        return FollowUp([*told, finish])
    return FollowUp(told, _reply(said, lambda call: call.reply))


def _find(call: SearchCallTranslator, lowered: TranslatedTurn, budget: TurnBudget) -> list[Delta]:
    budget.calls -= 1  # it is not the client's to answer
    budget.searches -= 1
    if budget.searches < 0:
        call.reply = "No more searches can be made."
        return []
    found = search_tools(call.arguments, lowered.catalog.hidden())
    for entry in found:
        entry.loaded = True
    tools: list[Any] = group_by_namespace(found)
    call.reply = describe_found_tools(tools, lowered.catalog)
    return [
        deltas.WholeItem(ToolSearchCall(call.arguments, execution="server", status="completed")),
        deltas.WholeItem(ToolSearchOutput(tools, execution="server", status="completed")),
    ]


def _reply(said: AnswerRecord, tell: Callable[[CallTranslator], str]) -> Items:
    """What the model said, and what its calls came to."""
    calls = iter(said.calls.values())
    spoken = said.list_items()
    outputs = [
        FunctionCallOutput(tell(next(calls)), item.call_id, status="completed")
        for item in spoken
        if isinstance(item, FunctionCall)
    ]
    return [*spoken, *outputs]
