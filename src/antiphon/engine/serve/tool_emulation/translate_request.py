"""Translation of a turn for a backend that only supports function tools, and perhaps no JSON schemas."""

from collections.abc import Sequence

import msgspec

from antiphon.backends.base import Capabilities, Turn
from antiphon.engine.serve.tool_emulation.catalog import Catalog
from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck, make_output_check
from antiphon.engine.serve.tool_emulation.tool_choice import CallRules, read_call_rules, translate_tool_choice
from antiphon.engine.serve.tool_emulation.translate_history import Items, are_all_readable, translate_items
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, wants_json
from antiphon.protocol.tool_lists import derive
from antiphon.protocol.tools import AllowedToolsChoice, Tool
from antiphon.protocol.unions import Tagged, Unknown, copy_struct


class TranslatedTurn(msgspec.Struct, frozen=True):
    """The turn for the backend, and the data to translate its answer. `request` is the request before translation."""

    turn: Turn
    catalog: Catalog
    rules: CallRules
    check: JsonOutputCheck | None
    request: CreateRequest

    def add_sources(self, tools: Sequence[Tool | Unknown]) -> "TranslatedTurn":
        """Add tools that a search may find, and return the turn with the rules for calls of them."""
        self.catalog.add_sources(tools)
        return msgspec.structs.replace(self, rules=read_call_rules(self.request, self.catalog))

    def extend(self, items: Items, *, max_tokens: int | None) -> "TranslatedTurn":
        """Return the turn with these items added, with the tools that are loaded by now."""
        request = copy_struct(self.turn.request)
        request.max_output_tokens = max_tokens
        request.tools = self.catalog.list_backend_tools(self.rules.allowed) or None
        turn = msgspec.structs.replace(self.turn, request=request, items=[*self.turn.items, *items])
        return msgspec.structs.replace(self, turn=turn)


def needs_translation(turn: Turn, native: Capabilities) -> bool:
    """Return True if the turn has tools, items or settings that the backend does not support itself."""
    request = turn.request
    if not native.json_schema and wants_json(request):
        return True
    if native.any_tool:
        return False
    if request.tools:
        if not derive(request.tools, ("are_native", native.tools), lambda tools: _are_native(tools, native)):
            return True
        if request.parallel_tool_calls is False or request.tool_choice == "none":
            return True
    # Some servers ignore a choice, so their answers must be checked.
    return request.tool_choice not in (None, "auto", "none") or not are_all_readable(turn.items)


def _are_native(tools: list[Tool | Unknown], native: Capabilities) -> bool:
    # By type, not by tool: few turns have more than two types.
    return all(
        issubclass(kind, Tagged) and kind.__struct_config__.tag in native.tools for kind in set(map(type, tools))
    )


def translate_turn(turn: Turn, native: Capabilities) -> TranslatedTurn:
    """Translate the turn. Raises InvalidRequest on an invalid schema, or on a required call without a tool to call."""
    check = None if native.json_schema else make_output_check(turn.request)
    request = turn.request if check is None else _add_format_instructions(turn.request, check)
    if native.any_tool:
        return TranslatedTurn(
            msgspec.structs.replace(turn, request=request), Catalog([], [], native.tools), CallRules(), check, request
        )
    catalog = Catalog(request.tools or [], turn.items, native.tools)
    if turn.load_deferred is not None:
        catalog.set_sources(request.tools or [])
    rules = read_call_rules(request, catalog)
    choice = translate_tool_choice(request.tool_choice, catalog)
    # A single required tool is named by the choice. All tools are still sent, so that the prompt cache stays valid.
    tools = catalog.list_backend_tools(rules.allowed if isinstance(request.tool_choice, AllowedToolsChoice) else None)
    if rules.must_call and not tools:
        message = "'tool_choice' requires a call, but there is no tool that could be called."
        raise InvalidRequest(message, param="tool_choice", code="invalid_value")
    translated = copy_struct(request)
    translated.tools, translated.tool_choice = (tools, choice) if tools else (None, None)
    items = translate_items(turn.items, catalog, custom="custom" in native.tools, images=native.images)
    return TranslatedTurn(
        msgspec.structs.replace(turn, request=translated, items=items), catalog, rules, check, request
    )


def _add_format_instructions(request: CreateRequest, check: JsonOutputCheck) -> CreateRequest:
    assert request.text is not None
    instructions = [request.instructions] if request.instructions else []
    return msgspec.structs.replace(
        request,
        instructions="\n\n".join([*instructions, check.make_instructions()]),
        text=msgspec.structs.replace(request.text, format=None),
    )
