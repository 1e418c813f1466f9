"""A turn in the terms of a backend that only knows functions, and perhaps no schemas."""

from copy import copy
from typing import Literal

import msgspec
from msgspec import Struct

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.serve.tool_emulation.catalog import Catalog, CatalogEntry, ToolKey, make_type_key
from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck, make_output_check
from antiphon.engine.serve.tool_emulation.translate_history import Items, are_readable, translate_items
from antiphon.errors import InvalidRequest
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat
from antiphon.protocol.tools import AllowedToolsChoice, CustomChoice, FunctionChoice, NamespaceTool, ToolChoice
from antiphon.protocol.unions import Tagged, Unknown

Choice = Literal["none", "auto", "required"] | ToolChoice | Unknown | None


class CallRules(Struct, frozen=True):
    """Which functions may be called (any, if None), how many calls there may be, and whether there must be one."""

    allowed: frozenset[str] | None = None
    most_calls: int | None = None
    must_call: bool = False


def read_call_rules(request: CreateRequest, catalog: Catalog) -> CallRules:
    choice = request.tool_choice
    allowed: frozenset[str] | None = None
    mode: object = choice
    if isinstance(choice, AllowedToolsChoice):
        mode = choice.mode
        allowed = frozenset(name for entry in choice.tools for name in _name_allowed(entry, catalog))
        _load(allowed, catalog)
    elif (chosen := _find_chosen(choice, catalog)) is not None:
        mode, allowed = "required", frozenset({chosen.name})
    if mode == "none":
        return CallRules(allowed, 0)
    return CallRules(allowed, 1 if request.parallel_tool_calls is False else None, mode == "required")


def translate_tool_choice(choice: Choice, catalog: Catalog) -> Choice:
    """The choice in words that every backend has."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode
    entry = _find_chosen(choice, catalog)
    if entry is None:
        return choice
    entry.loaded = True  # what must be called need not be searched for
    native_custom = entry.tool.type == "custom" and catalog.is_native(entry)
    return CustomChoice(entry.name) if native_custom else FunctionChoice(entry.name)


def _find_chosen(choice: Choice, catalog: Catalog) -> CatalogEntry | None:
    """The one tool that must be called."""
    if choice is None or isinstance(choice, str | Unknown | AllowedToolsChoice):
        return None
    if isinstance(choice, FunctionChoice | CustomChoice):
        return catalog.get(ToolKey("named", None, choice.name)) or catalog.find(choice.name)
    return catalog.get(make_type_key(choice.type))


def _load(allowed: frozenset[str], catalog: Catalog) -> None:
    """Where the search may not be called, what may be does not wait to be found."""
    search = catalog.get(make_type_key("tool_search"))
    if search is not None and search.name not in allowed:
        for entry in catalog:
            entry.loaded |= entry.name in allowed


def _name_allowed(allowed: JsonObject, catalog: Catalog) -> list[str]:
    """The functions that an entry of `allowed_tools` lets the model call."""
    kind, name, namespace = allowed.get("type"), allowed.get("name"), allowed.get("namespace")
    if kind == "namespace":
        return [entry.name for entry in catalog if _is_called(entry.namespace, name)]
    if kind in ("function", "tool", "custom"):
        entry = catalog.get(ToolKey("named", namespace, str(name))) or catalog.find(str(name))
        return [entry.name] if entry is not None else []
    entry = catalog.get(make_type_key(str(kind)))
    return [entry.name] if entry is not None else [str(kind)]


def _is_called(namespace: NamespaceTool | None, name: object) -> bool:
    return namespace is not None and namespace.name == name


class TranslatedTurn(msgspec.Struct, frozen=True):
    """The turn to give to the backend, and what is needed to understand its answer."""

    turn: Turn
    catalog: Catalog
    limits: CallRules
    check: JsonOutputCheck | None

    def go_on(self, said: Items, *, most_tokens: int | None) -> "TranslatedTurn":
        """The turn after these items, with the tools that are loaded by now, and so many tokens for the answer."""
        request = copy(self.turn.request)
        request.max_output_tokens = most_tokens
        request.tools = self.catalog.show(self.limits.allowed) or None
        turn = msgspec.structs.replace(self.turn, request=request, items=[*self.turn.items, *said])
        return msgspec.structs.replace(self, turn=turn)


def needs_translation(turn: Turn, native: Capabilities) -> bool:
    """Whether there is anything in the turn that the backend does not take as it is."""
    request = turn.request
    if not native.json_schema and wants_json(request):
        return True
    if native.any_tool:
        return False
    tools = request.tools or ()
    return (
        # By kind, not one by one: every turn is asked, and few have more than a kind or two.
        not all(_is_native(kind, native) for kind in set(map(type, tools)))
        # Not every server obeys a choice that it takes, so its answer is looked at.
        or request.tool_choice not in (None, "auto", "none")
        or (bool(tools) and (request.parallel_tool_calls is False or request.tool_choice == "none"))
        or not are_readable(turn.items)
    )


def _is_native(kind: type, native: Capabilities) -> bool:
    return issubclass(kind, Tagged) and kind.__struct_config__.tag in native.tools


def wants_json(request: CreateRequest) -> bool:
    return request.text is not None and isinstance(request.text.format, JsonSchemaFormat | JsonObjectFormat)


def translate_turn(turn: Turn, native: Capabilities) -> TranslatedTurn:
    """Put the turn in the backend's terms. Raises on a schema that is none, and where a call must be that cannot."""
    check = None if native.json_schema else make_output_check(turn.request)
    request = turn.request if check is None else _tell_format(turn.request, check)
    if native.any_tool:
        return TranslatedTurn(
            msgspec.structs.replace(turn, request=request), Catalog([], [], native.tools), CallRules(), check
        )
    catalog = Catalog(request.tools or [], turn.items, native.tools)
    limits = read_call_rules(request, catalog)
    chosen = translate_tool_choice(request.tool_choice, catalog)
    # One tool that must be called can be told by its name, so all are shown: a prompt cache stays warm.
    shown = catalog.show(limits.allowed if isinstance(request.tool_choice, AllowedToolsChoice) else None)
    if limits.must_call and not shown:
        told = "'tool_choice' requires a call, but there is no tool that could be called."
        raise InvalidRequest(told, param="tool_choice", code="invalid_value")
    request = copy(request)
    request.tools, request.tool_choice = (shown, chosen) if shown else (None, None)
    items = translate_items(turn.items, catalog, custom="custom" in native.tools, images=native.images)
    return TranslatedTurn(msgspec.structs.replace(turn, request=request, items=items), catalog, limits, check)


def _tell_format(request: CreateRequest, check: JsonOutputCheck) -> CreateRequest:
    assert request.text is not None
    told = [request.instructions] if request.instructions else []
    return msgspec.structs.replace(
        request,
        instructions="\n\n".join([*told, check.instruct()]),
        text=msgspec.structs.replace(request.text, format=None),
    )
