"""The decision at the end of a backend answer: finish, fail, or call the backend again.

The backend is called again after invalid calls, after tool searches, after a violation of `tool_choice`, and after an
answer that does not match `text.format`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from antiphon.engine.serve.tool_emulation.answer_record import AnswerRecord, TurnBudget
from antiphon.engine.serve.tool_emulation.tool_choice import find_violation, make_call_reminder
from antiphon.engine.serve.tool_emulation.tool_search import group_by_namespace, list_strings, search_tools
from antiphon.engine.serve.tool_emulation.translate_calls import (
    CallTranslator,
    DroppedCallTranslator,
    SearchCallTranslator,
)
from antiphon.engine.serve.tool_emulation.translate_history import Items, describe_found_tools
from antiphon.engine.serve.tool_emulation.translate_request import TranslatedTurn
from antiphon.protocol.content import InputText
from antiphon.protocol.hosted import ToolSearchCall, ToolSearchOutput
from antiphon.protocol.items import FunctionCall, FunctionCallOutput, Message
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta


class FollowUp(msgspec.Struct, frozen=True):
    """The deltas to emit, and the items to call the backend with again. None ends the response."""

    output: Sequence[Delta]
    next_items: Items | None = None


def decide_follow_up(
    answer: AnswerRecord, finish: deltas.Finish, translated: TranslatedTurn, budget: TurnBudget
) -> FollowUp:
    if finish.reason != "stop":
        return FollowUp([*answer.make_text_deltas(), finish])
    faults = [call.fault for call in answer.calls.values() if call.fault is not None]
    if faults:
        return _reject_calls(answer, faults, budget)
    if any(isinstance(call, SearchCallTranslator) for call in answer.calls.values()):
        return _run_searches(answer, finish, translated, budget)
    violation = find_violation(answer, translated.rules, budget)
    if violation is not None:
        return _retry_after_violation(answer, violation, translated, budget)
    return _check_output(answer, finish, translated, budget)


def request_correction(answer: AnswerRecord, fault: str) -> Items:
    """Return the answer and a message that asks the model to correct it."""
    message = f"This answer is not what was asked for: {fault}. Answer again, with nothing but the JSON."
    return [*answer.list_items(), Message("user", [InputText(message)], status="completed")]


def _check_output(
    answer: AnswerRecord, finish: deltas.Finish, translated: TranslatedTurn, budget: TurnBudget
) -> FollowUp:
    """Check the text against `text.format`. An answer of calls only, or a refusal, needs no check."""
    calls = answer.calls.values()
    has_calls = answer.has_custom_call or any(not isinstance(call, DroppedCallTranslator) for call in calls)
    if translated.check is None or answer.is_refusal or (has_calls and not answer.held_text):
        return FollowUp([*answer.make_text_deltas(), finish])
    text, faults = translated.check.parse("".join(answer.held_text))
    if not faults:
        answer.held_text = [text]
        return FollowUp([*answer.make_text_deltas(), finish])
    fault = "; ".join(faults)
    if not budget.retries:
        message = f"The model's answer does not match 'text.format': {fault}"
        return FollowUp([deltas.Failure(message, "invalid_output", "model_error")])
    budget.retries -= 1
    return FollowUp([], request_correction(answer, fault))


def _reject_calls(answer: AnswerRecord, faults: Sequence[str], budget: TurnBudget) -> FollowUp:
    output = answer.take_commentary()
    if not budget.retries:
        message = f"The model called a tool with invalid arguments: {'; '.join(faults)}"
        return FollowUp([*output, deltas.Failure(message, "invalid_tool_input", "model_error")])
    budget.retries -= 1
    budget.calls -= len(faults)
    return FollowUp(output, _answer_calls(answer, _make_rejection))


def _make_rejection(call: CallTranslator) -> str:
    if call.fault is None:
        return call.reply
    return (
        f"The call was not carried out, since its arguments are wrong: {call.fault}. "
        "Call the tool again, with right ones."
    )


def _retry_after_violation(
    answer: AnswerRecord, violation: deltas.Failure, translated: TranslatedTurn, budget: TurnBudget
) -> FollowUp:
    """Ask for an allowed call. Text that came instead is emitted, as it may well come before a call."""
    output = [*answer.take_commentary(), deltas.CloseItem()]
    if not budget.retries:
        return FollowUp([*output, violation])
    budget.retries -= 1
    next_items = _answer_calls(answer, lambda call: call.reply)
    if translated.rules.must_call:
        next_items.append(make_call_reminder(translated.rules))
    return FollowUp(output, next_items)


def _run_searches(
    answer: AnswerRecord, finish: deltas.Finish, translated: TranslatedTurn, budget: TurnBudget
) -> FollowUp:
    """Run the tool searches and call the backend again, unless the client has a call to answer first."""
    output = answer.take_commentary()
    for call in answer.calls.values():
        if isinstance(call, SearchCallTranslator):
            output += _run_search(call, translated, budget)
    internal = SearchCallTranslator | DroppedCallTranslator
    has_client_call = answer.has_custom_call or any(not isinstance(call, internal) for call in answer.calls.values())
    # Stop a model that goes on searching when no searches are left.
    if has_client_call or budget.searches < -1:
        return FollowUp([*output, finish])
    return FollowUp(output, _answer_calls(answer, lambda call: call.reply))


def _run_search(call: SearchCallTranslator, translated: TranslatedTurn, budget: TurnBudget) -> list[Delta]:
    budget.calls -= 1  # the client does not answer it
    budget.searches -= 1
    if budget.searches < 0:
        call.reply = "No more searches can be made."
        return []
    found = search_tools(call.arguments, translated.catalog.list_deferred())
    for entry in found:
        entry.loaded = True
    tools: list[Any] = group_by_namespace(found)
    call.reply = describe_found_tools(tools, translated.catalog)
    # The API's arguments are the names of the tools and namespaces, not the words of the model.
    paths = [tool.name for tool in tools] or list(list_strings(call.arguments))
    return [
        deltas.WholeItem(ToolSearchCall({"paths": paths}, execution="server", status="completed")),
        deltas.WholeItem(ToolSearchOutput(tools, execution="server", status="completed")),
    ]


def _answer_calls(answer: AnswerRecord, reply: Callable[[CallTranslator], str]) -> Items:
    """Return the answer's items, and an output for each of its calls."""
    calls = iter(answer.calls.values())
    items = answer.list_items()
    outputs = [
        FunctionCallOutput(reply(next(calls)), item.call_id, status="completed")
        for item in items
        if isinstance(item, FunctionCall)
    ]
    return [*items, *outputs]
