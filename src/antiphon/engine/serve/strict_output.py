"""Strict schemas that another server promises to hold its model to: not every server does.

Whether an answer is what was asked for is known at its end, and one that is not has failed: whoever asked for a strict
schema reads nothing else. Where somebody may be listening, it is told as it comes. Where nobody can be, it is told when
it is whole, and can be asked for once more.
"""

import asyncio
from contextlib import aclosing
from copy import copy

import msgspec

from antiphon.backends.base import Backend, Turn
from antiphon.engine.serve.tool_emulation.answer_record import AnswerRecord, TurnBudget
from antiphon.engine.serve.tool_emulation.follow_up import request_correction
from antiphon.engine.serve.tool_emulation.freeform import strip_fence
from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.engine.serve.truncation import start_turn
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, JsonSchemaFormat
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Deltas

# What cannot be taken back by asking for another answer: somebody has done it, or is to do it.
_DEEDS = (deltas.ToolCall, deltas.CustomToolCall, deltas.WholeItem, deltas.OpenItem)
_INSTEAD = (deltas.ToolCall, deltas.CustomToolCall, deltas.Refusal)
# What may come while an answer goes on.
_BESIDE = (deltas.Annotate, deltas.TokenUsage, deltas.Passthrough, deltas.NewPart, deltas.Amend, deltas.Served)
_FENCED = "the JSON stands in a code fence"


def hold(answer: Deltas, turn: Turn, backend: Backend) -> Deltas:
    """The backend's answer to this turn, held to its strict schema if nobody but another server does that."""
    request = turn.request
    form = find_strict(request) if backend.capabilities.verify_json_schema else None
    if form is None:
        return answer
    # The stream of a background response can be read by whoever comes, and from the first event on.
    return hold_to(form, answer) if request.stream or request.background else insist_on(form, answer, turn, backend)


def find_strict(request: CreateRequest) -> JsonSchemaFormat | None:
    """The schema that an answer must fit."""
    form = request.text.format if request.text is not None else None
    return form if isinstance(form, JsonSchemaFormat) and form.strict else None


async def hold_to(form: JsonSchemaFormat, answer: Deltas) -> Deltas:
    """The answer as it comes; it fails in the end if it does not fit."""
    heard = _Answer()
    async with aclosing(answer):
        async for batch in answer:
            for delta in batch:
                heard.take(delta)
            fault = await heard.judge(form)
            yield batch if fault is None else [*batch[:-1], _fail(fault)]


async def insist_on(form: JsonSchemaFormat, answer: Deltas, turn: Turn, backend: Backend) -> Deltas:
    """The answer when it is whole. If it is mere words that do not fit, another one, and of this one what it took.

    A code fence comes off by itself.
    """
    budget = TurnBudget(max_tokens=turn.request.max_output_tokens)
    heard = await _hear(form, answer, budget)
    if heard.fault is not None and heard.is_talk:
        yield heard.account
        said = AnswerRecord(0)
        said.received = heard.said[:-1]
        following = _go_on(turn, request_correction(said, heard.fault), most_tokens=budget.count_tokens_left())
        heard = await _hear(form, (await start_turn(backend, following)).deltas, budget)
    if heard.fault is None:
        yield heard.said
    else:
        yield [*(heard.account if heard.is_talk else heard.said[:-1]), _fail(heard.fault)]
    if heard.error is not None:
        raise heard.error


class _Heard(msgspec.Struct, frozen=True):
    """All that was said, what is wrong with it as an answer, and what broke it off."""

    said: list[Delta]
    fault: str | None
    error: Exception | None

    @property
    def is_talk(self) -> bool:
        return not any(isinstance(each, _DEEDS) for each in self.said)

    @property
    def account(self) -> list[Delta]:
        """Who said it, and what it took."""
        return [each for each in self.said if isinstance(each, deltas.Served | deltas.TokenUsage)]


async def _hear(form: JsonSchemaFormat, answer: Deltas, budget: TurnBudget) -> _Heard:
    heard = _Answer()
    said: list[Delta] = []
    before = budget.spent
    try:
        async with aclosing(answer):
            async for batch in answer:
                for each in batch:
                    heard.take(each)
                    if isinstance(each, deltas.TokenUsage):
                        said.append(deltas.TokenUsage(budget.add_usage(each.usage, before)))
                    else:
                        said.append(each)
    except Exception as error:  # what came before is told before it
        return _Heard(said, None, error)
    fault = await heard.judge(form)
    return _Heard(heard.unwrap(said), None, None) if fault == _FENCED else _Heard(said, fault, None)


def _go_on(turn: Turn, said: Items, *, most_tokens: int | None) -> Turn:
    request = copy(turn.request)
    request.max_output_tokens = most_tokens
    return msgspec.structs.replace(turn, request=request, items=[*turn.items, *said])


class _Answer:
    """What was said last. Words before a call are no answer, and neither are those that are said to be none."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}
        self._taken = 0
        self._over = False
        self._aside = False
        self._ended = False

    async def judge(self, form: JsonSchemaFormat) -> str | None:
        """What is wrong with it, if it has come to its end."""
        text = "".join(self._words.values()) if self._ended else ""
        return await asyncio.to_thread(_find_fault, form, text) if text else None

    def unwrap(self, said: list[Delta]) -> list[Delta]:
        """All that was taken, with the answer in one piece, and without the code fence around it."""
        first = next(iter(self._words))
        bare = deltas.Text(strip_fence("".join(self._words.values())).strip())
        kept = ((place, each) for place, each in enumerate(said) if place == first or place not in self._words)
        return [bare if place == first else each for place, each in kept]

    def take(self, delta: Delta) -> None:
        self._ended = isinstance(delta, deltas.Finish) and delta == deltas.Finish()
        if isinstance(delta, deltas.Text):
            if self._over:
                self._words.clear()
                self._over = False
            if not self._aside:
                self._words[self._taken] = delta.text
        elif isinstance(delta, _INSTEAD):
            self._words.clear()
        elif not isinstance(delta, _BESIDE):
            self._over = True
            self._aside = isinstance(delta, deltas.Phase) and delta.phase == "commentary"
        self._taken += 1


def _fail(fault: str) -> Delta:
    told = f"The model's server did not hold it to the schema, and its answer does not fit: {fault}"
    return deltas.Failure(told, "invalid_output", "model_error")


def _find_fault(form: JsonSchemaFormat, text: str) -> str | None:
    try:
        bare, faults = JsonOutputCheck(form).parse(text)
    except InvalidRequest:  # the server has taken the schema: that we cannot check it is no fault of the answer's
        return None
    if not faults and bare != text.strip():
        return _FENCED
    return "; ".join(faults) or None
