"""Search for deferred tools by words."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import CatalogEntry
from antiphon.protocol.tools import NamespaceTool, Tool
from antiphon.protocol.unions import Unknown

MAX_FOUND = 5
_WORD = re.compile(r"[^\W_]+")


def search_tools(arguments: Any, deferred: Iterable[CatalogEntry]) -> list[CatalogEntry]:
    """Return the tools that match most words of the arguments, best first. Rare words weigh more."""
    entries = list(deferred)
    texts = [_list_words(entry) for entry in entries]
    query = {word for text in _list_strings(arguments) for word in _split(text)}
    weights = {word: 1 / (1 + sum(any(_matches(word, each) for each in text) for text in texts)) for word in query}
    scores = [
        sum(weight for word, weight in weights.items() if any(_matches(word, each) for each in text)) for text in texts
    ]
    ranked = sorted(range(len(entries)), key=lambda index: -scores[index])
    return [entries[index] for index in ranked if scores[index] > 0][:MAX_FOUND]


def group_by_namespace(entries: Iterable[CatalogEntry]) -> list[Tool | Unknown]:
    """Return the tools as a request lists them: the tools of a namespace inside it."""
    grouped: dict[str, Tool | Unknown] = {}
    for entry in entries:
        if entry.namespace is None:
            grouped[entry.name] = entry.tool
            continue
        group = f"namespace {entry.namespace.name}"
        known = grouped.get(group)
        children = known.tools if isinstance(known, NamespaceTool) else []
        grouped[group] = msgspec.structs.replace(entry.namespace, tools=[*children, entry.tool])
    return list(grouped.values())


def _list_words(entry: CatalogEntry) -> set[str]:
    tool: Any = entry.tool
    texts = [entry.name, tool.name, getattr(tool, "description", None) or ""]
    if entry.namespace is not None:
        texts += [entry.namespace.name, entry.namespace.description]
    properties = (getattr(tool, "parameters", None) or {}).get("properties")
    texts += list(properties) if isinstance(properties, dict) else []
    return {word for text in texts for word in _split(text)}


def _split(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _matches(query: str, word: str) -> bool:
    """Return True if the words are equal, or one of more than three letters starts the other."""
    return query == word or (len(query) > 3 and word.startswith(query)) or (len(word) > 3 and query.startswith(word))


def _list_strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _list_strings(each)
