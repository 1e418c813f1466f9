"""`tool_choice` and `parallel_tool_calls`: translate them for the backend and enforce them on its answer.

A backend may ignore a choice, so every answer is checked. Calls that are not allowed are dropped. If a required call is
missing, the backend is called once more, unless the retry of this response is used up, and then the response fails.
`find_violation` finds a violation, and `follow_up.decide_follow_up` acts on it.
"""

import logging
from typing import Literal

from msgspec import Struct

from antiphon.engine.serve.tool_emulation.answer_record import AnswerRecord, TurnBudget
from antiphon.engine.serve.tool_emulation.catalog import Catalog, CatalogEntry, ToolKey, make_type_key
from antiphon.engine.serve.tool_emulation.translate_calls import DroppedCallTranslator
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Message
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import AllowedToolsChoice, CustomChoice, FunctionChoice, NamespaceTool, ToolChoice
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas

logger = logging.getLogger(__name__)

Choice = Literal["none", "auto", "required"] | ToolChoice | Unknown | None

_NOT_ALLOWED = deltas.Failure(
    "The model called only tools that 'tool_choice' does not allow.", "tool_not_allowed", "model_error"
)
_NOT_CALLED = deltas.Failure(
    "'tool_choice' requires a call, but the model made none.", "tool_not_called", "model_error"
)


class CallRules(Struct, frozen=True):
    """The allowed calls of a turn: backend names of tools (None is all), a maximum, and if a call is required."""

    allowed: frozenset[str] | None = None
    max_calls: int | None = None
    must_call: bool = False


def read_call_rules(request: CreateRequest, catalog: Catalog) -> CallRules:
    choice = request.tool_choice
    allowed: frozenset[str] | None = None
    mode: object = choice
    if isinstance(choice, AllowedToolsChoice):
        mode = choice.mode
        allowed = frozenset(name for entry in choice.tools for name in _list_allowed_names(entry, catalog))
        _load_allowed_tools(allowed, catalog)
    elif (chosen := _find_chosen_tool(choice, catalog)) is not None:
        mode, allowed = "required", frozenset({chosen.name})
    if mode == "none":
        return CallRules(allowed, 0)
    return CallRules(allowed, 1 if request.parallel_tool_calls is False else None, mode == "required")


def translate_tool_choice(choice: Choice, catalog: Catalog) -> Choice:
    """Return the choice in a form that every backend accepts."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode
    entry = _find_chosen_tool(choice, catalog)
    if entry is None:
        return choice
    entry.loaded = True  # a required tool needs no search
    is_native_custom = entry.tool.type == "custom" and catalog.is_native(entry)
    return CustomChoice(entry.name) if is_native_custom else FunctionChoice(entry.name)


def _find_chosen_tool(choice: Choice, catalog: Catalog) -> CatalogEntry | None:
    """Return the one tool that the choice requires."""
    if choice is None or isinstance(choice, str | Unknown | AllowedToolsChoice):
        return None
    if isinstance(choice, FunctionChoice | CustomChoice):
        return catalog.get(ToolKey("named", None, choice.name)) or catalog.find(choice.name)
    return catalog.get(make_type_key(choice.type))


def _load_allowed_tools(allowed: frozenset[str], catalog: Catalog) -> None:
    """Load the allowed tools if the search is not allowed: the model could not find them otherwise."""
    search = catalog.get(make_type_key("tool_search"))
    if search is not None and search.name not in allowed:
        for entry in catalog:
            entry.loaded |= entry.name in allowed


def _list_allowed_names(allowed: JsonObject, catalog: Catalog) -> list[str]:
    """Return the backend names of the tools that an entry of `allowed_tools` allows."""
    kind, name, namespace = allowed.get("type"), allowed.get("name"), allowed.get("namespace")
    if kind == "namespace":
        return [entry.name for entry in catalog if _has_name(entry.namespace, name)]
    if kind in ("function", "tool", "custom"):
        entry = catalog.get(ToolKey("named", namespace, str(name)))
        if entry is None and namespace in (None, name):  # a deferred function is its own namespace
            entry = catalog.find(str(name))
        return [entry.name] if entry is not None else []
    entry = catalog.get(make_type_key(str(kind)))
    return [entry.name] if entry is not None else [str(kind)]


def _has_name(namespace: NamespaceTool | None, name: object) -> bool:
    return namespace is not None and namespace.name == name


# Enforcement


def admit_call(name: str, rules: CallRules, budget: TurnBudget) -> bool:
    """Return True and count the call if the rules allow it. Else log a warning: the call is to be dropped."""
    if rules.allowed is not None and name not in rules.allowed:
        logger.warning("dropped a call of '%s': tool_choice does not allow this tool", name)
        return False
    if rules.max_calls is not None and budget.calls >= rules.max_calls:
        logger.warning("dropped a call of '%s': the request allows %d tool calls", name, rules.max_calls)
        return False
    budget.calls += 1
    return True


def find_violation(answer: AnswerRecord, rules: CallRules, budget: TurnBudget) -> deltas.Failure | None:
    """Return the failure to report if the answer has only forbidden calls, or lacks a required call."""
    if _has_only_dropped_calls(answer):
        return _NOT_ALLOWED
    return _NOT_CALLED if rules.must_call and not _has_call(answer, budget) else None


def make_call_reminder(rules: CallRules) -> Message:
    """Return the message that asks the model for the required call."""
    wanted = " or ".join(sorted(rules.allowed or ())) or "one of the tools"
    return Message("user", [InputText(f"A call was asked for. Call {wanted} now.")], status="completed")


def _has_only_dropped_calls(answer: AnswerRecord) -> bool:
    has_text = any(isinstance(each, deltas.Text) for each in answer.received)
    if answer.is_refusal or answer.has_custom_call or has_text:
        return False
    return bool(answer.calls) and all(isinstance(call, DroppedCallTranslator) for call in answer.calls.values())


def _has_call(answer: AnswerRecord, budget: TurnBudget) -> bool:
    """Return True if a tool was called, also by the backend itself, or if the model refused to answer."""
    ran_tool = any(isinstance(each, deltas.WholeItem | deltas.OpenItem) for each in answer.received)
    return budget.has_called or ran_tool or answer.is_refusal
