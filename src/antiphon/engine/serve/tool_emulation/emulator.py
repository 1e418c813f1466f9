"""A backend that can do more than the one it wraps: what that one lacks is put in terms of what it has.

A turn is lowered (`lowering`), the backend answers, and the answer is raised (`raising`). Where the backend must be
asked again, because a call makes no sense or a search has found tools, that happens within the same response.
"""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.engine.serve.tool_emulation.catalog import EMULATED_TYPES
from antiphon.engine.serve.tool_emulation.follow_up import TurnBudget
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
    """Wraps a backend, and is one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._native = backend.capabilities
        self.capabilities = add_emulated_capabilities(self._native)

    async def start(self) -> None:
        await self._backend.start()
        # Some backends only know then what they can do.
        self._native = self._backend.capabilities
        self.capabilities = add_emulated_capabilities(self._native)

    async def close(self) -> None:
        await self._backend.close()

    def models(self) -> Sequence[Model]:
        return self._backend.models()

    async def stream(self, turn: Turn) -> Deltas:
        if not needs_translation(turn, self._native):
            return await self._backend.stream(turn)
        lowered = translate_turn(turn, self._native)
        return self._speak(lowered, await self._backend.stream(lowered.turn))

    async def count_tokens(self, turn: Turn) -> int:
        if needs_translation(turn, self._native):
            turn = translate_turn(turn, self._native).turn
        return await self._backend.count_tokens(turn)

    def describe(self, request: CreateRequest) -> list[str]:
        """What of a request the wrapped backend does with this help alone, in words for whoever sent it."""
        told: list[str] = []
        if not self._native.json_schema and wants_json(request):
            told.append("text.format: the model is told of it and its answer is checked")
        if not self._native.any_tool:
            kinds = dict.fromkeys(tool.type for tool in request.tools or ())
            emulated = [kind for kind in kinds if kind in self.capabilities.tools - self._native.tools]
            if emulated:
                told.append(f"tools: emulated by functions: {', '.join(emulated)}")
        return told

    async def _speak(self, lowered: TranslatedTurn, answer: Deltas) -> Deltas:
        request = lowered.turn.request
        budget = TurnBudget(most_searches=request.max_tool_calls, most_tokens=request.max_output_tokens)
        while True:
            spoken = AnswerTranslator(lowered, budget)
            async with aclosing(answer):
                async for batch in answer:
                    if told := spoken.feed(batch):
                        yield told
            if spoken.following is None:
                return
            lowered = lowered.go_on(spoken.following, most_tokens=budget.tokens_left())
            answer = await self._backend.stream(lowered.turn)


def add_emulated_capabilities(native: Capabilities) -> Capabilities:
    """What a backend can do with this help."""
    tools = native.tools | EMULATED_TYPES | {"namespace"} if "function" in native.tools else native.tools
    return msgspec.structs.replace(native, tools=tools, json_schema=True)
