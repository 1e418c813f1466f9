"""Strict schemas that another server promises to hold its model to: not every server does.

What it says is told as it comes. Whether it is what was asked for is known at its end, and an answer that is not has
failed: whoever asked for a strict schema reads nothing else.
"""

import asyncio
from contextlib import aclosing

from antiphon.backends.base import Deltas
from antiphon.engine.emulation.answer import AnswerCheck
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, JsonSchemaFormat
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta

_INSTEAD = (deltas.ToolCall, deltas.CustomToolCall, deltas.Refusal)
# What may come while an answer goes on.
_BESIDE = (deltas.Annotate, deltas.Tokens, deltas.Passthrough, deltas.NewPart, deltas.Amend, deltas.Served)


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
            fault = None
            if batch and batch[-1] == deltas.Finish() and heard.text:
                fault = await asyncio.to_thread(_find_fault, form, heard.text)
            yield batch if fault is None else [*batch[:-1], deltas.Failure(fault, "invalid_output", "model_error")]


class _Answer:
    """What was said last. Words before a call are no answer, and neither are those that are said to be none."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._over = False
        self._aside = False

    @property
    def text(self) -> str:
        return "".join(self._words)

    def take(self, delta: Delta) -> None:
        if isinstance(delta, deltas.Text):
            if self._over:
                self._words.clear()
                self._over = False
            if not self._aside:
                self._words.append(delta.text)
        elif isinstance(delta, _INSTEAD):
            self._words.clear()
        elif not isinstance(delta, _BESIDE):
            self._over = True
            self._aside = isinstance(delta, deltas.Phase) and delta.phase == "commentary"


def _find_fault(form: JsonSchemaFormat, text: str) -> str | None:
    try:
        bare, faults = AnswerCheck(form).read(text)
    except InvalidRequest:  # the server has taken the schema: that we cannot check it is no fault of the answer's
        return None
    if not faults and bare != text.strip():
        faults = ["the JSON stands in a code fence"]
    if not faults:
        return None
    return f"The model's server did not hold it to the schema, and its answer does not fit: {'; '.join(faults)}"
