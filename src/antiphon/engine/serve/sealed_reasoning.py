"""Reasoning that clients carry: sealed on its way out, opened on its way back to a model.

What a backend needs to go on (a signature, an upstream's own encrypted form) is opaque to everyone but that backend, so
it goes back to no other. The words of the reasoning go to any model.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from antiphon.backends.base import Backend, Model, Turn
from antiphon.engine.items import ItemPage
from antiphon.engine.prepare.param_paths import rewrite_backend_error
from antiphon.engine.sealing import Sealer
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.content import ReasoningText
from antiphon.protocol.events import TERMINAL, Event, OutputItemDone
from antiphon.protocol.items import Item, Reasoning
from antiphon.protocol.response import Response
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas
from antiphon.stream.deltas import Delta, Deltas

_PURPOSE = "reasoning"
_WANTED = "reasoning.encrypted_content"


class Thought(msgspec.Struct, omit_defaults=True):
    """What is in a seal: the words, and what the backend of this name gave for itself alone."""

    backend: str
    text: str = ""
    opaque: str | None = None


def screen(items: Sequence[Item | Unknown], sealer: Sealer, *, project: str) -> tuple[list[Item | Unknown], list[str]]:
    """The items without seals that do not open, and a warning for each: one of them must not end a conversation."""
    if Reasoning not in map(type, items):
        return list(items), []
    kept: list[Item | Unknown] = []
    warnings: list[str] = []
    for item in items:
        if not isinstance(item, Reasoning) or not item.encrypted_content or _open(item, sealer, project) is not None:
            kept.append(item)
            continue
        warnings.append(f"reasoning {item.id}: its encrypted_content does not open here and was left out")
        if item.summary or item.content:
            kept.append(msgspec.structs.replace(item, encrypted_content=None))
    return kept, warnings


def _open(item: Reasoning, sealer: Sealer, project: str) -> Thought | None:
    payload = sealer.open(item.encrypted_content or "", project=project, purpose=_PURPOSE)
    return None if payload is None else msgspec.json.decode(payload, type=Thought)


class LateSealer:
    """Seals reasoning that was kept without a seal, for a client that asks for one only now.

    What was opaque in it has been sealed already: there are only words left to seal, and they go to any model.
    """

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def seal_item(self, item: Item | Unknown, *, project: str) -> Item | Unknown:
        if not isinstance(item, Reasoning) or item.encrypted_content:
            return item
        words = "".join(part.text for part in item.content or () if isinstance(part, ReasoningText))
        payload = msgspec.json.encode(Thought("", words))
        sealed = self._sealer.seal(payload, project=project, purpose=_PURPOSE)
        return msgspec.structs.replace(item, encrypted_content=sealed)

    def seal_page(self, page: ItemPage, *, project: str) -> ItemPage:
        return msgspec.structs.replace(page, data=[self.seal_item(item, project=project) for item in page.data])

    def seal_response(self, response: Response, *, project: str) -> Response:
        output = [self.seal_item(item, project=project) for item in response.output]
        return msgspec.structs.replace(response, output=output)

    def seal_events(self, batch: Sequence[Event | Unknown], *, project: str) -> list[Event | Unknown]:
        return [self._seal_event(event, project) if event.type in _TELL_ALL else event for event in batch]

    def _seal_event(self, event: Event | Unknown, project: str) -> Event | Unknown:
        # What comes out of the event log has not been read into a struct.
        read = codec.decode_event(event.raw) if isinstance(event, Unknown) else event
        if isinstance(read, OutputItemDone):
            return msgspec.structs.replace(read, item=self.seal_item(read.item, project=project))
        if isinstance(read, TERMINAL):
            return msgspec.structs.replace(read, response=self.seal_response(read.response, project=project))
        return event


_TELL_ALL = frozenset(kind.__struct_config__.tag for kind in (OutputItemDone, *TERMINAL))


class ReasoningSealer:
    """A backend whose reasoning can be carried by clients. Everything else goes through as it is."""

    def __init__(self, name: str, backend: Backend, sealer: Sealer) -> None:
        self._name = name
        self._backend = backend
        self._sealer = sealer
        self.capabilities = backend.capabilities

    async def start(self) -> None:
        await self._backend.start()

    async def close(self) -> None:
        await self._backend.close()

    def models(self) -> Sequence[Model]:
        return self._backend.models()

    async def count_tokens(self, turn: Turn) -> int:
        opened = self._unseal(turn)
        try:
            return await self._backend.count_tokens(opened)
        except InvalidRequest as error:
            self._correct(error, opened)
            raise

    async def stream(self, turn: Turn) -> Deltas:
        opened = self._unseal(turn)
        try:
            answer = await self._backend.stream(opened)
        except InvalidRequest as error:
            self._correct(error, opened)
            raise
        return self._seal(answer, turn) if self.capabilities.reasoning else answer

    def _correct(self, error: InvalidRequest, turn: Turn) -> None:
        """Only here are the items those that the backend has counted."""
        if not self.capabilities.any_tool:  # which passes items on, to a server that counts what it was sent
            rewrite_backend_error(error, turn)

    def _unseal(self, turn: Turn) -> Turn:
        if Reasoning not in map(type, turn.items):
            return turn
        opened = [self._unseal_item(item, turn.project) for item in turn.items]
        return msgspec.structs.replace(turn, items=[item for item in opened if item is not None])

    def _unseal_item(self, item: Item | Unknown, project: str) -> Item | Unknown | None:
        if not isinstance(item, Reasoning) or not item.encrypted_content:
            return item
        thought = _open(item, self._sealer, project) or Thought("")
        opaque = thought.opaque if thought.backend == self._name else None
        content = [ReasoningText(thought.text)] if thought.text else item.content
        if not (opaque or content or item.summary):
            return None
        return msgspec.structs.replace(item, content=content, encrypted_content=opaque)

    async def _seal(self, answer: Deltas, turn: Turn) -> AsyncGenerator[Sequence[Delta], None]:
        envelope = _Envelope(self._name, always=_WANTED in (turn.request.include or ()))
        async with aclosing(answer):
            async for batch in answer:
                if envelope.is_empty and _OF_REASONING.isdisjoint(map(type, batch)):  # nearly always
                    yield batch
                    continue
                sealed: list[Delta] = []
                for delta in batch:
                    thought = envelope.take(delta)
                    if thought is not None:
                        payload = msgspec.json.encode(thought)
                        text = self._sealer.seal(payload, project=turn.project, purpose=_PURPOSE)
                        sealed.append(deltas.ReasoningSeal(text))
                    if not isinstance(delta, deltas.ReasoningSeal):
                        sealed.append(delta)
                if sealed:
                    yield sealed


_OF_REASONING = frozenset({deltas.Reasoning, deltas.ReasoningSummary, deltas.ReasoningSeal})
# What may come while reasoning goes on.
_BESIDE = (deltas.TokenUsage, deltas.Passthrough, deltas.NewPart, deltas.Amend, deltas.ItemEvent)


class _Envelope:
    """Gathers one stretch of reasoning. Without `always`, only what has an opaque part is sealed."""

    def __init__(self, backend: str, *, always: bool) -> None:
        self._backend = backend
        self._always = always
        self._words: list[str] = []
        self.is_empty = True

    def take(self, delta: Delta) -> Thought | None:
        """The thought that ends here, if it is to be sealed: with this delta, or right before it."""
        if isinstance(delta, deltas.ReasoningSeal):
            return self._close(delta.encrypted_content)
        if isinstance(delta, deltas.Reasoning | deltas.ReasoningSummary):
            self.is_empty = False
            if isinstance(delta, deltas.Reasoning):
                self._words.append(delta.text)
            return None
        if self.is_empty or isinstance(delta, _BESIDE):
            return None
        thought = self._close(None)
        return thought if self._always else None

    def _close(self, opaque: str | None) -> Thought:
        thought = Thought(self._backend, "".join(self._words), opaque)
        self._words.clear()
        self.is_empty = True
        return thought
