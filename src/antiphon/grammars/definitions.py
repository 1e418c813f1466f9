"""Limits on the grammars of custom tools: Lark grammars and regular expressions, checked before they are compiled."""

import json
import re

from antiphon.config.settings import GrammarLimits
from antiphon.errors import InvalidRequest
from antiphon.grammars.patterns import PatternFault, exceeds_size
from antiphon.grammars.schema_check import SchemaCheck

# The parts of a Lark grammar that matter: texts, comments and patterns are skipped or read as a whole. An unclosed text
# or pattern ends with its line, so that no part is read twice.
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"?)
    |/(?P<pattern>(?:[^/\\\n]|\\.)+)/?
    |(?P<rule>:)
    |(?P<schema>%json\s*)(?=\{)
    |\{\s*(?:(?P<least>\d+)\s*)?(?:,\s*(?:(?P<most>\d+)\s*)?)?\}
    |~\s*(?P<first>\d+)(?:\s*\.\.\s*(?P<last>\d+))?""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder()
_MAX_DIGITS = 9
_MAX_SHOWN = 40


def check_definition(syntax: str, definition: str, limits: GrammarLimits, *, param: str) -> None:
    """Raise InvalidRequest if a grammar exceeds the limits. Errors in its syntax are left to the compiler."""
    if len(definition) > limits.definition_length:
        _refuse("has too many characters", limits.definition_length, "definition_length", param)
    if syntax == "lark":
        _check_lark(definition, limits, param)
    else:
        _check_pattern(definition, limits, param)


def _check_lark(definition: str, limits: GrammarLimits, param: str) -> None:
    schemas = SchemaCheck(limits)
    position = rules = 0
    while found := _TOKEN.search(definition, position):
        position = found.end()
        if found["pattern"] is not None:
            _check_pattern(found["pattern"], limits, param)
        elif found["rule"] is not None:
            rules += 1
            if rules > limits.rules:
                _refuse("has too many rules", limits.rules, "rules", param)
        elif found["schema"] is not None:
            try:
                schema, position = _DECODER.raw_decode(definition, position)
            except (ValueError, RecursionError):
                continue  # the compiler reports it
            schemas.check(schema, f"{param}.%json")
        else:
            counts = [found[name] for name in ("least", "most", "first", "last") if found[name]]
            if any(len(count) > _MAX_DIGITS or int(count) > limits.items for count in counts):
                _refuse(f"repeats a rule with {found[0][:40]}", limits.items, "items", param)


def _check_pattern(pattern: str, limits: GrammarLimits, param: str) -> None:
    try:
        is_too_large = exceeds_size(pattern, limits.pattern_size)
    except PatternFault:
        return  # the compiler reports it
    if is_too_large:
        shown = pattern if len(pattern) <= _MAX_SHOWN else f"{pattern[: _MAX_SHOWN - 3]}..."
        fact = f"has the pattern /{shown}/, which is too large with its repetitions written out"
        _refuse(fact, limits.pattern_size, "pattern_size", param)


def _refuse(fact: str, limit: int, name: str, param: str) -> None:
    raise InvalidRequest(
        f"The grammar {fact}. The limit is {limit} (setting grammars.{name}).", param=param, code="invalid_value"
    )
