"""Whether a text fits a grammar, of the dialects that the API itself takes, or the pattern of a JSON schema."""

import functools
import json
from typing import TYPE_CHECKING

from antiphon.protocol.tools import GrammarInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SHOWN = 60
# Reading a long grammar holds up everyone else, and rules that lead on and on are more than the reader's stack holds.
_LONGEST = 50_000
_MOST_RULES = 1000


def find_grammar_error(grammar: GrammarInput) -> str | None:
    """What is wrong with the grammar itself."""
    if len(grammar.definition) > _LONGEST:
        return f"it has more than {_LONGEST} characters."
    if grammar.syntax == "lark" and grammar.definition.count(":") > _MOST_RULES:
        return f"it has more than {_MOST_RULES} rules."
    return _find_fault(grammar.syntax, grammar.definition)


@functools.lru_cache(maxsize=256)
def _find_fault(syntax: str, definition: str) -> str | None:
    matcher = _match(syntax, definition)
    return matcher.get_error().strip() if matcher.is_error() else None


def explain_mismatch(text: str, grammar: GrammarInput) -> str | None:
    """Where the text leaves the grammar, told so that a model can do better."""
    matcher = _match(grammar.syntax, grammar.definition)
    if matcher.is_error():
        return f"the grammar cannot be read: {matcher.get_error().strip()}"
    written = text.encode(errors="replace")
    read = matcher.try_consume_tokens(list(written))
    if read == len(written):
        return None if matcher.is_accepting() else f"it ends too early, after {_tail(written)!r}"
    rest = written[read : read + _SHOWN].decode(errors="replace")
    return f"it does not fit the grammar from {rest!r} on, which follows {_tail(written[:read])!r}"


def matches_pattern(text: str, pattern: str) -> bool | None:
    """Whether some part of the text matches, as JSON schemas have it. None if that cannot be told of this pattern.

    Python's own expressions take forever over patterns like `(a+)+$`, and everyone else would wait.
    """
    if len(pattern) > _LONGEST:
        return None
    matcher = _match_pattern(pattern).deep_copy()
    if matcher.is_error():
        return None
    # The matcher reads JSON, where it knows this one character in no other spelling.
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace")
    read = matcher.try_consume_tokens(list(written))
    return None if matcher.is_error() else read == len(written) and matcher.is_accepting()


@functools.lru_cache(maxsize=256)
def _match_pattern(pattern: str) -> "LLMatcher":
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return LLMatcher(_make_tokenizer(), grammar, log_level=0)


def _tail(text: bytes) -> str:
    return text[-_SHOWN:].decode(errors="replace")


def _match(syntax: str, definition: str) -> "LLMatcher":
    # It takes a while to load, and few requests bring a grammar.
    from llguidance import LLMatcher

    read = LLMatcher.grammar_from_lark if syntax == "lark" else LLMatcher.grammar_from_regex
    return LLMatcher(_make_tokenizer(), read(definition), log_level=0)


@functools.cache
def _make_tokenizer() -> "LLTokenizer":
    """One token a byte."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
