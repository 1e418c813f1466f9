"""What `tool_choice` and `parallel_tool_calls` let a model do, for a backend that only knows functions."""

from typing import Literal

from msgspec import Struct

from antiphon.engine.emulation.catalog import Catalog, Entry
from antiphon.engine.emulation.names import Identity, identify_type
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.tools import (
    AllowedToolsChoice,
    CustomChoice,
    FunctionChoice,
    JsonObject,
    NamespaceTool,
    ToolChoice,
)

Choice = Literal["none", "auto", "required"] | ToolChoice | Unknown | None


class Limits(Struct, frozen=True):
    """Which functions may be called (any, if None), how many calls there may be, and whether there must be one."""

    allowed: frozenset[str] | None = None
    most_calls: int | None = None
    must_call: bool = False


def read_limits(request: CreateRequest, catalog: Catalog) -> Limits:
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
        return Limits(allowed, 0)
    return Limits(allowed, 1 if request.parallel_tool_calls is False else None, mode == "required")


def lower_choice(choice: Choice, catalog: Catalog) -> Choice:
    """The choice in words that every backend has."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.mode
    entry = _find_chosen(choice, catalog)
    if entry is None:
        return choice
    entry.loaded = True  # what must be called need not be searched for
    native_custom = entry.tool.type == "custom" and catalog.is_native(entry)
    return CustomChoice(entry.name) if native_custom else FunctionChoice(entry.name)


def _find_chosen(choice: Choice, catalog: Catalog) -> Entry | None:
    """The one tool that must be called."""
    if choice is None or isinstance(choice, str | Unknown | AllowedToolsChoice):
        return None
    if isinstance(choice, FunctionChoice | CustomChoice):
        return catalog.get(Identity("named", None, choice.name)) or catalog.find(choice.name)
    return catalog.get(identify_type(choice.type))


def _load(allowed: frozenset[str], catalog: Catalog) -> None:
    """Where the search may not be called, what may be does not wait to be found."""
    search = catalog.get(identify_type("tool_search"))
    if search is not None and search.name not in allowed:
        for entry in catalog:
            entry.loaded |= entry.name in allowed


def _name_allowed(allowed: JsonObject, catalog: Catalog) -> list[str]:
    """The functions that an entry of `allowed_tools` lets the model call."""
    kind, name, namespace = allowed.get("type"), allowed.get("name"), allowed.get("namespace")
    if kind == "namespace":
        return [entry.name for entry in catalog if _is_called(entry.namespace, name)]
    if kind in ("function", "tool", "custom"):
        entry = catalog.get(Identity("named", namespace, str(name))) or catalog.find(str(name))
        return [entry.name] if entry is not None else []
    entry = catalog.get(identify_type(str(kind)))
    return [entry.name] if entry is not None else [str(kind)]


def _is_called(namespace: NamespaceTool | None, name: object) -> bool:
    return namespace is not None and namespace.name == name
