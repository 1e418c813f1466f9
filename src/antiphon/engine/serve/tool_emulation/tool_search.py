"""Finding deferred tools by words."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import CatalogEntry
from antiphon.protocol.tools import NamespaceTool, Tool
from antiphon.protocol.unions import Unknown

MOST_FOUND = 5
_WORD = re.compile(r"[^\W_]+")


def search_tools(arguments: Any, hidden: Iterable[CatalogEntry]) -> list[CatalogEntry]:
    """The tools that have most of the words, best first. Rare words tell more than those that many tools have."""
    entries = list(hidden)
    texts = [_words_of(entry) for entry in entries]
    asked = {word for text in _strings(arguments) for word in _split(text)}
    weights = {word: 1 / (1 + sum(any(_fits(word, each) for each in text) for text in texts)) for word in asked}
    scores = [
        sum(weight for word, weight in weights.items() if any(_fits(word, each) for each in text)) for text in texts
    ]
    ranked = sorted(range(len(entries)), key=lambda index: -scores[index])
    return [entries[index] for index in ranked if scores[index] > 0][:MOST_FOUND]


def group_by_namespace(entries: Iterable[CatalogEntry]) -> list[Tool | Unknown]:
    """The tools as a request would list them: children inside of their namespace."""
    grouped: dict[str, Tool | Unknown] = {}
    for entry in entries:
        if entry.namespace is None:
            grouped[entry.name] = entry.tool
            continue
        place = f"namespace {entry.namespace.name}"
        known = grouped.get(place)
        before = known.tools if isinstance(known, NamespaceTool) else []
        grouped[place] = msgspec.structs.replace(entry.namespace, tools=[*before, entry.tool])
    return list(grouped.values())


def _words_of(entry: CatalogEntry) -> set[str]:
    tool: Any = entry.tool
    told = [entry.name, tool.name, getattr(tool, "description", None) or ""]
    if entry.namespace is not None:
        told += [entry.namespace.name, entry.namespace.description]
    properties = (getattr(tool, "parameters", None) or {}).get("properties")
    told += list(properties) if isinstance(properties, dict) else []
    return {word for text in told for word in _split(text)}


def _split(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _fits(asked: str, word: str) -> bool:
    """The same word, or the same but for its ending."""
    return asked == word or (len(asked) > 3 and word.startswith(asked)) or (len(word) > 3 and asked.startswith(word))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
