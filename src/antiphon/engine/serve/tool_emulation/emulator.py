"""Emulation of tools and JSON output for a backend that only supports function tools.

A turn is translated for the backend (`translate_request`), and the backend's answer is translated back
(`translate_response`). If a call is invalid, or a tool search found tools, the backend is called again within the same
response (`follow_up`).
"""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.engine.serve.tool_emulation.answer_record import TurnBudget
from antiphon.engine.serve.tool_emulation.catalog import EMULATED_TYPES
from antiphon.engine.serve.tool_emulation.translate_request import (
    TranslatedTurn,
    needs_translation,
    translate_turn,
    wants_json,
)
from antiphon.engine.serve.tool_emulation.translate_response import AnswerTranslator
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas


class Emulator:
    """A backend that wraps another and adds the emulated tool types and JSON output."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._native = backend.capabilities
        self.capabilities = add_emulated_capabilities(self._native)

    async def start(self) -> None:
        await self._backend.start()
        # Some backends know their capabilities only after the start.
        self._native = self._backend.capabilities
        self.capabilities = add_emulated_capabilities(self._native)

    async def close(self) -> None:
        await self._backend.close()

    def models(self) -> Sequence[Model]:
        return self._backend.models()

    async def stream(self, turn: Turn) -> Deltas:
        if not needs_translation(turn, self._native):
            return await self._backend.stream(turn)
        translated = translate_turn(turn, self._native)
        return self._stream_answers(translated, await self._backend.stream(translated.turn))

    async def count_tokens(self, turn: Turn) -> int:
        if needs_translation(turn, self._native):
            turn = translate_turn(turn, self._native).turn
        return await self._backend.count_tokens(turn)

    def describe(self, request: CreateRequest) -> list[str]:
        """Return a warning for each part of the request that is emulated."""
        warnings: list[str] = []
        if not self._native.json_schema and wants_json(request):
            warnings.append("text.format: sent to the model as an instruction, and the answer is checked")
        if not self._native.any_tool:
            kinds = dict.fromkeys(tool.type for tool in request.tools or ())
            emulated = [kind for kind in kinds if kind in self.capabilities.tools - self._native.tools]
            if emulated:
                warnings.append(f"tools: emulated by functions: {', '.join(emulated)}")
        return warnings

    async def _stream_answers(self, translated: TranslatedTurn, answer: Deltas) -> Deltas:
        request = translated.turn.request
        budget = TurnBudget(max_searches=request.max_tool_calls, max_tokens=request.max_output_tokens)
        while True:
            translator = AnswerTranslator(translated, budget)
            async with aclosing(answer):
                async for batch in answer:
                    if output := translator.feed(batch):
                        yield output
            if translator.next_items is None:
                return
            translated = translated.extend(translator.next_items, max_tokens=budget.count_tokens_left())
            answer = await self._backend.stream(translated.turn)


def add_emulated_capabilities(native: Capabilities) -> Capabilities:
    """Return the capabilities of a backend with emulation."""
    tools = native.tools | EMULATED_TYPES | {"namespace"} if "function" in native.tools else native.tools
    return msgspec.structs.replace(native, tools=tools, json_schema=True)
