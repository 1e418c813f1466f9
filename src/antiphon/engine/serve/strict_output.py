"""Strict schemas that an upstream promises to enforce. Not every upstream does.

The answer is checked when it is complete. An answer that does not fit fails the response, because a client that
requested a strict schema cannot read anything else. The answer to a streamed turn is forwarded as it arrives and
checked at its end. Another answer is held until it is complete, so that the model can be asked once more.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Turn
from antiphon.engine.serve.stage import Stage
from antiphon.engine.serve.tool_emulation.answer_record import AnswerRecord, TurnBudget
from antiphon.engine.serve.tool_emulation.follow_up import request_correction
from antiphon.engine.serve.tool_emulation.freeform import strip_fence
from antiphon.engine.serve.tool_emulation.json_output import JsonOutputCheck
from antiphon.engine.serve.tool_emulation.translate_history import Items
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, JsonSchemaFormat
from antiphon.protocol.unions import copy_struct
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Deltas

# An answer with one of these cannot be replaced by another: it has an effect, or asks the client for one.
_EFFECTS = (deltas.ToolCall, deltas.CustomToolCall, deltas.WholeItem, deltas.OpenItem)
_NO_ANSWER = (deltas.ToolCall, deltas.CustomToolCall, deltas.Refusal)
# Deltas that may come between two pieces of the same text.
_BETWEEN_TEXT = (deltas.Annotate, deltas.TokenUsage, deltas.Passthrough, deltas.NewPart, deltas.Amend, deltas.Served)
_FENCED = "the JSON stands in a code fence"


class StrictOutput(Stage):
    """Checks answers against a strict schema, for backends whose schema support is only a promise."""

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        schema = find_strict_schema(turn.request) if self.capabilities.verify_json_schema else None
        return self.inner.stream(turn) if schema is None else self._stream_checked(schema, turn)

    async def _stream_checked(self, schema: JsonSchemaFormat, turn: Turn) -> Deltas:
        answer = await self.inner.stream(turn)
        if turn.streamed:
            return check_at_end(schema, answer)
        return self._check_and_retry(schema, answer, turn)

    async def _check_and_retry(self, schema: JsonSchemaFormat, answer: Deltas, turn: Turn) -> Deltas:
        """Yield the complete answer. If it is plain text that does not fit, ask for another one, once.

        A code fence around the JSON is removed. The usage of a replaced answer is kept.
        """
        budget = TurnBudget(max_tokens=turn.request.max_output_tokens)
        collected = await _collect(schema, answer, budget)
        if collected.fault is not None and collected.is_replaceable:
            turn.progress.is_sent = budget.spent is None
            yield list(map(_reopen, collected.accounting))
            record = AnswerRecord(0)
            record.received = collected.deltas[:-1]
            following = _extend(
                turn, request_correction(record, collected.fault), max_tokens=budget.count_tokens_left()
            )
            answer = await self.inner.stream(following)
            turn.progress.is_sent = True
            collected = await _collect(schema, answer, budget)
        if collected.fault is None:
            yield collected.deltas
        else:
            shown = collected.accounting if collected.is_replaceable else collected.deltas[:-1]
            yield [*shown, _make_failure(collected.fault)]
        if collected.error is not None:
            raise collected.error


def find_strict_schema(request: CreateRequest) -> JsonSchemaFormat | None:
    """Return the schema that the answer must fit, if the request has a strict one."""
    form = request.text.format if request.text is not None else None
    return form if isinstance(form, JsonSchemaFormat) and form.strict else None


async def check_at_end(schema: JsonSchemaFormat, answer: Deltas) -> Deltas:
    """Yield the answer as it arrives, and replace its end by a failure if it does not fit."""
    text = _AnswerText()
    async with aclosing(answer):
        async for batch in answer:
            for delta in batch:
                text.add(delta)
            fault = await text.find_fault(schema)
            yield batch if fault is None else [*batch[:-1], _make_failure(fault)]


class _Collected(msgspec.Struct, frozen=True):
    """All deltas of an answer, the fault in its text, and the error that ended it early."""

    deltas: list[Delta]
    fault: str | None
    error: Exception | None

    @property
    def is_replaceable(self) -> bool:
        return not any(isinstance(each, _EFFECTS) for each in self.deltas)

    @property
    def accounting(self) -> list[Delta]:
        """The deltas that name the model and its token usage."""
        return [each for each in self.deltas if isinstance(each, deltas.Served | deltas.TokenUsage)]


async def _collect(schema: JsonSchemaFormat, answer: Deltas, budget: TurnBudget) -> _Collected:
    text = _AnswerText()
    collected: list[Delta] = []
    before = budget.spent
    try:
        async with aclosing(answer):
            async for batch in answer:
                for each in batch:
                    text.add(each)
                    if isinstance(each, deltas.TokenUsage):
                        collected.append(deltas.TokenUsage(budget.add_usage(each.usage, before), each.is_open))
                    else:
                        collected.append(each)
    except Exception as error:  # the deltas before it are forwarded first
        return _Collected(collected, None, error)
    fault = await text.find_fault(schema)
    if fault == _FENCED:
        return _Collected(text.remove_fence(collected), None, None)
    return _Collected(collected, fault, None)


def _extend(turn: Turn, items: Items, *, max_tokens: int | None) -> Turn:
    request = copy_struct(turn.request)
    request.max_output_tokens = max_tokens
    return msgspec.structs.replace(turn, request=request, items=[*turn.items, *items])


class _AnswerText:
    """The text of the last message of an answer. Text before a call, and commentary, is not part of it."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}
        self._count = 0
        self._closed = False
        self._in_commentary = False
        self._ended = False

    async def find_fault(self, schema: JsonSchemaFormat) -> str | None:
        """Return the fault in the text if the answer has ended, else None."""
        text = "".join(self._pieces.values()) if self._ended else ""
        return await asyncio.to_thread(_find_fault, schema, text) if text else None

    def remove_fence(self, collected: list[Delta]) -> list[Delta]:
        """Return the collected deltas with the text in one piece, without the code fence around it."""
        first = next(iter(self._pieces))
        bare = deltas.Text(strip_fence("".join(self._pieces.values())).strip())
        rest = ((index, each) for index, each in enumerate(collected) if index == first or index not in self._pieces)
        return [bare if index == first else each for index, each in rest]

    def add(self, delta: Delta) -> None:
        self._ended = isinstance(delta, deltas.Finish) and delta == deltas.Finish()
        if isinstance(delta, deltas.Text):
            if self._closed:
                self._pieces.clear()
                self._closed = False
            if not self._in_commentary:
                self._pieces[self._count] = delta.text
        elif isinstance(delta, _NO_ANSWER):
            self._pieces.clear()
        elif not isinstance(delta, _BETWEEN_TEXT):
            self._closed = True
            self._in_commentary = isinstance(delta, deltas.Phase) and delta.phase == "commentary"
        self._count += 1


def _reopen(delta: Delta) -> Delta:
    """Return a usage as one to which the next model call adds its own."""
    return deltas.TokenUsage(delta.usage, is_open=True) if isinstance(delta, deltas.TokenUsage) else delta


def _make_failure(fault: str) -> Delta:
    message = f"The upstream did not enforce the schema, and the answer does not fit it: {fault}"
    return deltas.Failure(message, "invalid_output", "model_error")


def _find_fault(schema: JsonSchemaFormat, text: str) -> str | None:
    try:
        bare, faults = JsonOutputCheck(schema).parse(text)
    except InvalidRequest:  # the upstream accepted a schema that cannot be checked here: not a fault of the answer
        return None
    if not faults and bare != text.strip():
        return _FENCED
    return "; ".join(faults) or None
