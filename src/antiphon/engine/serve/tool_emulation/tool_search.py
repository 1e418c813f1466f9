"""Search for deferred tools by words, ranked by BM25."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from antiphon.engine.serve.tool_emulation.catalog import CatalogEntry
from antiphon.protocol.tools import NamespaceTool, Tool
from antiphon.protocol.unions import Unknown

MAX_FOUND = 5
# The usual parameters of BM25: saturation of repeated words, and the weight of a text's length.
_SATURATION = 1.2
_LENGTH_WEIGHT = 0.75
# A word of a name counts as this many words of a description.
_NAME_WEIGHT = 3
# The shortest word that matches a word that it starts.
_MIN_PREFIX = 4
_WORD = re.compile(r"[^\W_]+")


def search_tools(arguments: Any, deferred: Iterable[CatalogEntry]) -> list[CatalogEntry]:
    """Return the tools whose names and descriptions fit the words of the arguments best, best first."""
    entries = list(deferred)
    texts = [_count_words(entry) for entry in entries]
    query = dict.fromkeys(word for text in list_strings(arguments) for word in _split(text))
    scores = _score(list(query), texts)
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


def list_strings(value: Any) -> Iterable[str]:
    """Yield the strings in the arguments of a search."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from list_strings(each)


def _score(query: list[str], texts: list[Counter[str]]) -> list[float]:
    """Return the BM25 score of each text. A word matches words that it starts, and words that start it."""
    lengths = [text.total() for text in texts]
    average = sum(lengths) / len(lengths) if any(lengths) else 1.0
    scores = [0.0] * len(texts)
    for word in query:
        counts = [sum(count for each, count in text.items() if _matches(word, each)) for text in texts]
        matches = sum(count > 0 for count in counts)
        rarity = math.log(1 + (len(texts) - matches + 0.5) / (matches + 0.5))
        for index, count in enumerate(counts):
            length = 1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * lengths[index] / average
            scores[index] += rarity * count * (_SATURATION + 1) / (count + _SATURATION * length)
    return scores


def _count_words(entry: CatalogEntry) -> Counter[str]:
    tool: Any = entry.tool
    words = Counter(dict.fromkeys(_split(tool.name), _NAME_WEIGHT))
    texts = [getattr(tool, "description", None) or ""]
    if entry.namespace is not None:
        texts += [entry.namespace.name, entry.namespace.description]
    properties = (getattr(tool, "parameters", None) or {}).get("properties")
    texts += list(properties) if isinstance(properties, dict) else []
    words.update(word for text in texts for word in _split(text))
    return words


def _split(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _matches(query: str, word: str) -> bool:
    """Return True if the words are equal, or one of them starts the other and is not very short."""
    return (
        query == word
        or (len(query) >= _MIN_PREFIX and word.startswith(query))
        or (len(word) >= _MIN_PREFIX and query.startswith(word))
    )
