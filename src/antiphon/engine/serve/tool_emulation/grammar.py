"""Matching of texts against Lark grammars, regular expressions, and patterns of JSON schemas."""

import functools
import json
from typing import TYPE_CHECKING

from antiphon.grammars.patterns import PatternFault, exceeds_size
from antiphon.protocol.tools import GrammarInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_EXCERPT_LENGTH = 60
# The matcher holds the interpreter's lock for some milliseconds per slice. Other threads run between slices.
_SLICE_BYTES = 1024
# The size of a pattern with its repetitions written out. Larger ones are not matched.
_MAX_PATTERN_SIZE = 10_000


def explain_mismatch(text: str, grammar: GrammarInput) -> str | None:
    """Return a description of the first mismatch, for the model to correct it. None if the text matches.

    The grammar must have passed a `GrammarCheck`.
    """
    matcher = _make_matcher(grammar.syntax, grammar.definition).deep_copy()
    if matcher.is_error():
        return f"the grammar cannot be read: {matcher.get_error().strip()}"
    encoded = text.encode(errors="replace")
    read = _consume(matcher, encoded)
    if read == len(encoded):
        return None if matcher.is_accepting() else f"it ends too early, after {_tail(encoded)!r}"
    rest = encoded[read : read + _EXCERPT_LENGTH].decode(errors="replace")
    return f"it does not fit the grammar from {rest!r} on, which follows {_tail(encoded[:read])!r}"


def matches_pattern(text: str, pattern: str) -> bool | None:
    """Return True if some part of the text matches the pattern of a JSON schema. None if the pattern is unsupported.

    Matching takes linear time. Python's `re` needs exponential time for patterns like `(a+)+$`.
    """
    try:
        if exceeds_size(pattern, _MAX_PATTERN_SIZE):
            return None
    except PatternFault:
        return None
    matcher = _make_pattern_matcher(pattern).deep_copy()
    if matcher.is_error():
        return None
    # The matcher reads JSON and accepts this character only in escaped form.
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace")
    read = _consume(matcher, written)
    return None if matcher.is_error() else read == len(written) and matcher.is_accepting()


@functools.lru_cache(maxsize=256)
def _make_pattern_matcher(pattern: str) -> "LLMatcher":
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return LLMatcher(_make_tokenizer(), grammar, log_level=0)


def _consume(matcher: "LLMatcher", text: bytes) -> int:
    """Return the number of bytes that match."""
    for start in range(0, len(text), _SLICE_BYTES):
        part = text[start : start + _SLICE_BYTES]
        read = matcher.try_consume_tokens(list(part))
        if read < len(part):
            return start + read
    return len(text)


def _tail(text: bytes) -> str:
    return text[-_EXCERPT_LENGTH:].decode(errors="replace")


@functools.lru_cache(maxsize=64)
def _make_matcher(syntax: str, definition: str) -> "LLMatcher":
    # Imported here: it loads slowly, and few requests have a grammar.
    from llguidance import LLMatcher

    read = LLMatcher.grammar_from_lark if syntax == "lark" else LLMatcher.grammar_from_regex
    return LLMatcher(_make_tokenizer(), read(definition), log_level=0)


@functools.cache
def _make_tokenizer() -> "LLTokenizer":
    """Return a tokenizer with one token per byte."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
