"""Emulation of tools and JSON output for a backend that only supports function tools.

A turn is translated for the backend (`translate_request`), and the backend's answer is translated back
(`translate_response`). After an invalid call, a tool search, a violation of `tool_choice` or a wrong output format, the
backend is called again within the same response (`follow_up`).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import aclosing

import msgspec

from antiphon import offload
from antiphon.backends.base import Backend, Capabilities, Turn
from antiphon.engine.serve.stage import Stage
from antiphon.engine.serve.tool_emulation.answer_record import TurnBudget
from antiphon.engine.serve.tool_emulation.catalog import EMULATED_TYPES
from antiphon.engine.serve.tool_emulation.grammar_check import GrammarCheck
from antiphon.engine.serve.tool_emulation.translate_request import (
    TranslatedTurn,
    needs_translation,
    translate_turn,
)
from antiphon.engine.serve.tool_emulation.translate_response import AnswerTranslator
from antiphon.errors import InvalidRequest
from antiphon.protocol.request import CreateRequest, wants_json
from antiphon.protocol.tool_lists import derive
from antiphon.protocol.tools import Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Delta, Deltas, Finish, TokenUsage


class Emulator(Stage):
    """A stage that adds the emulated tool types and JSON output to a backend."""

    def __init__(self, inner: Backend, grammars: GrammarCheck | None = None) -> None:
        super().__init__(inner)
        self._grammars = grammars or GrammarCheck()

    def extend(self, capabilities: Capabilities) -> Capabilities:
        extended = add_emulated_capabilities(capabilities)
        self._emulated_types = extended.tools - capabilities.tools
        return extended

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        is_translated = needs_translation(turn, self.inner.capabilities)
        return self._stream_translated(turn) if is_translated else self.inner.stream(turn)

    async def _stream_translated(self, turn: Turn) -> Deltas:
        # Calls are matched against the grammars. Another candidate or another process may have accepted the tools.
        if not self.inner.capabilities.any_tool:
            await self._check_grammars(turn)
        translated = await self._translate(turn)
        return self._stream_answers(translated, await self.inner.stream(translated.turn))

    async def _check_grammars(self, turn: Turn) -> None:
        try:
            await self._grammars.check_tools(turn.request.tools or [], project=turn.project)
            await self._grammars.check_items(turn.items, project=turn.project)
        except InvalidRequest as error:
            error.code = "unsupported_grammar"  # the next candidate may support it
            raise

    async def count_tokens(self, turn: Turn) -> int:
        if needs_translation(turn, self.inner.capabilities):
            turn = (await self._translate(turn)).turn
        return await self.inner.count_tokens(turn)

    async def _translate(self, turn: Turn) -> TranslatedTurn:
        """Translate a turn, in a thread if a schema has to be compiled."""
        capabilities = self.inner.capabilities
        if not capabilities.json_schema and wants_json(turn.request):
            return await asyncio.to_thread(translate_turn, turn, capabilities)
        return await offload.run(translate_turn, turn, capabilities)

    def describe_emulation(self, request: CreateRequest) -> list[str]:
        """Return a warning for each part of the request that is emulated."""
        warnings: list[str] = []
        if not self.inner.capabilities.json_schema and wants_json(request):
            warnings.append("text.format: sent to the model as an instruction, and the answer is checked")
        if request.tools and not self.inner.capabilities.any_tool:
            emulated = derive(request.tools, ("list_emulated", self._emulated_types), self._list_emulated)
            if emulated:
                warnings.append(f"tools: emulated by functions: {', '.join(emulated)}")
        return warnings

    def _list_emulated(self, tools: list[Tool | Unknown]) -> list[str]:
        """Return the types among these tools that are emulated."""
        return [kind for kind in dict.fromkeys(tool.type for tool in tools) if kind in self._emulated_types]

    async def _stream_answers(self, translated: TranslatedTurn, answer: Deltas) -> Deltas:
        request = translated.turn.request
        budget = TurnBudget(max_searches=request.max_tool_calls, max_tokens=request.max_output_tokens)
        is_loaded = translated.turn.load_deferred is None
        while True:
            translator = AnswerTranslator(translated, budget)
            async with aclosing(answer):
                async for batch in answer:
                    if not is_loaded and batch and isinstance(batch[-1], Finish):
                        yield await _feed(translator, batch[:-1])
                        if translator.has_search:
                            is_loaded = True
                            translated, listed = await _load_deferred(translated)
                            yield listed
                        output = await _feed(translator, batch[-1:])
                    else:
                        output = await _feed(translator, batch)
                    if output:
                        yield output
                    if translator.has_failed:
                        return
            if translator.next_items is None:
                return
            progress = translated.turn.progress
            if budget.spent is not None:
                progress.is_sent = False
                yield [TokenUsage(budget.spent, is_open=True)]
            translated = translated.extend(translator.next_items, max_tokens=budget.count_tokens_left())
            answer = await self.inner.stream(translated.turn)
            progress.is_sent = True


async def _feed(translator: AnswerTranslator, batch: Sequence[Delta]) -> list[Delta]:
    return await asyncio.to_thread(translator.feed, batch) if translator.is_costly(batch) else translator.feed(batch)


async def _load_deferred(translated: TranslatedTurn) -> tuple[TranslatedTurn, list[Delta]]:
    """Add the tools that a search may find, and return the deltas of the items that list them."""
    assert translated.turn.load_deferred is not None
    tools, output = await translated.turn.load_deferred()
    return translated.add_sources(tools), output


def add_emulated_capabilities(native: Capabilities) -> Capabilities:
    """Return the capabilities of a backend with emulation."""
    tools = native.tools | EMULATED_TYPES | {"namespace"} if "function" in native.tools else native.tools
    return msgspec.structs.replace(native, tools=tools, json_schema=True)
