"""Decide between a call and a text before the output starts, from the likelihoods of its first token.

The output continues the same prompt. The model has read it when the decision is made, so a decision costs one token.
The output is then held to the decision: to the tools' schemas, or to a text that is not a call.
"""

import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from antiphon.backends.base import Turn
from antiphon.backends.embedded.grammar import CALL_OPENING, OutputRules, build_grammar
from antiphon.backends.embedded.model import CompletionChunk, TokenCandidate
from antiphon.backends.embedded.output import OutputReader
from antiphon.backends.embedded.printed_calls import CallForms, requests_code
from antiphon.backends.embedded.prompt import DECISION_QUESTION
from antiphon.protocol.items import CustomToolCallOutput, FunctionCallOutput

# Less likely tokens do not change the sum.
_CANDIDATES = 40
# The first characters of a call that is printed as JSON.
_JSON_OPENINGS = ("```", "{")
# A call is made if its margin exceeds these. At 0, the decision is the most likely output. After a tool's result, small
# models tend to repeat their call.
_THRESHOLD = 0.0
_THRESHOLD_AFTER_RESULT = math.log(3)


class OutputRequest(NamedTuple):
    """A completion request and the reader of its output."""

    body: dict[str, Any]
    reader: OutputReader


class CallDecision:
    """The decision of one turn, whose output `body` requests. `request` is the completion request to decide with.

    With examples of calls in the prompt, a model that wants to call a tool starts with a call. Without them it often
    starts with an explanation, so it first has to name the tool.
    """

    def __init__(self, turn: Turn, rules: OutputRules, body: dict[str, Any], *, examples: bool) -> None:
        self._rules = rules
        self._body = body
        self._examples = examples
        # A client that wants JSON gets it as text.
        self._count_json = rules.answer is None and not requests_code(turn)
        after_result = bool(turn.items) and isinstance(turn.items[-1], FunctionCallOutput | CustomToolCallOutput)
        self._threshold = _THRESHOLD_AFTER_RESULT if after_result else _THRESHOLD
        # After a result, `<` is more often the start of the result's tag, which small models like to repeat.
        self._count_tag_start = not after_result
        prompt = body["prompt"] if examples else [*body["prompt"], DECISION_QUESTION]
        self.request = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": _CANDIDATES}

    def decide(self, candidates: Iterable[TokenCandidate]) -> OutputRequest:
        """Return the output for these candidates of the first token."""
        names = () if self._examples else (*self._rules.tools, *self._rules.custom_tools)
        count_json = self._count_json or not self._examples
        margin = compute_call_margin(
            candidates, count_json=count_json, count_tag_start=self._count_tag_start, names=names
        )
        if margin > self._threshold:
            return self._require_call(self._rules)
        rules = replace(self._rules, tools={}, custom_tools={}, max_calls=0)
        tools = {*self._rules.tools, *(set(self._rules.custom_tools) - self._rules.open_ended)}
        forms = CallForms(tools) if self._count_json else None
        body = self._body | {"grammar": build_grammar(rules, forbid_calls=True)}
        return OutputRequest(body, OutputReader(tools=(), forms=forms))

    def require_tool(self, name: str) -> OutputRequest:
        """Return an output with calls of this tool, which the model started to print as text."""
        tools = {each: path for each, path in self._rules.tools.items() if each == name}
        custom_tools = {each: path for each, path in self._rules.custom_tools.items() if each == name}
        return self._require_call(replace(self._rules, tools=tools, custom_tools=custom_tools))

    def _require_call(self, rules: OutputRules) -> OutputRequest:
        rules = replace(rules, may_answer=False, answer=None)
        reader = OutputReader(tools={*rules.tools, *rules.custom_tools}, open_ended=rules.open_ended)
        return OutputRequest(self._body | {"grammar": build_grammar(rules, forbid_calls=True)}, reader)


def read_candidates(chunks: Iterable[CompletionChunk]) -> list[TokenCandidate]:
    """Return the candidates for the first token; none if the chunks do not contain it."""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content:
                return list(choice.logprobs.content[0].top_logprobs)
    return []


def compute_call_margin(
    candidates: Iterable[TokenCandidate],
    *,
    count_json: bool,
    count_tag_start: bool = True,
    names: Collection[str] = (),
) -> float:
    """Return the logarithm of the likelihood of a call, divided by that of the most likely other token.

    With `count_json`, JSON counts as a call. With `count_tag_start`, a token that is only the start of the call's tag
    does. The start of one of the `names` counts too.
    """
    call, other = 0.0, 0.0
    for candidate in candidates:
        likelihood = math.exp(candidate.logprob)
        text = candidate.token.strip()
        if _names_call(text, names) or _opens_call(text, count_json=count_json, count_tag_start=count_tag_start):
            call += likelihood
        else:
            other = max(other, likelihood)
    if not call:
        return -math.inf
    return math.log(call / other) if other else math.inf


def _names_call(text: str, names: Collection[str]) -> bool:
    return bool(text) and any(name.lower().startswith(text.lower()) for name in names)


def _opens_call(text: str, *, count_json: bool, count_tag_start: bool) -> bool:
    if not text:
        return False
    if text.startswith(CALL_OPENING) or (count_tag_start and CALL_OPENING.startswith(text)):
        return True
    return count_json and text.startswith(_JSON_OPENINGS)
