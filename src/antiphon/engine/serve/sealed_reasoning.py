"""Encrypted reasoning: sealed for the client that carries it, opened again for the model.

A backend may need opaque state to continue its reasoning, such as a signature or its own encrypted form. That state
goes back only to the backend it came from. The text of the reasoning goes to any model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import msgspec

from antiphon import offload
from antiphon.backends.base import Backend, Turn
from antiphon.engine.items import ItemPage
from antiphon.engine.prepare.param_paths import rewrite_backend_error
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.stage import Stage
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


class SealedContent(msgspec.Struct, omit_defaults=True):
    """The plaintext of an `encrypted_content`: the reasoning text, and opaque state of the named backend.

    `upstream_id` is the id of the item at the backend's upstream, which belongs to the opaque state.
    """

    backend: str
    text: str = ""
    opaque: str | None = None
    upstream_id: str = ""


def drop_unreadable_seals(
    items: Sequence[Item | Unknown], sealer: Sealer, *, project: str
) -> tuple[list[Item | Unknown], list[str]]:
    """Return the items without `encrypted_content` that cannot be opened, and a warning for each.

    One unreadable seal must not make a conversation unusable.
    """
    if Reasoning not in map(type, items):
        return list(items), []
    readable: list[Item | Unknown] = []
    warnings: list[str] = []
    for item in items:
        if not isinstance(item, Reasoning) or not item.encrypted_content or _open(item, sealer, project) is not None:
            readable.append(item)
            continue
        warnings.append(f"reasoning {item.id}: its encrypted_content cannot be opened here and was left out")
        if item.summary or item.content:
            readable.append(msgspec.structs.replace(item, encrypted_content=None))
    return readable, warnings


def _open(item: Reasoning, sealer: Sealer, project: str) -> SealedContent | None:
    payload = sealer.open(item.encrypted_content or "", project=project, purpose=_PURPOSE)
    return None if payload is None else msgspec.json.decode(payload, type=SealedContent)


class StoredReasoningSealer:
    """Seals reasoning that was stored without a seal, for a client that requests `encrypted_content` later.

    Opaque state was sealed when it was stored, so only text is left to seal, which any model can read.
    """

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def seal_item(self, item: Item | Unknown, *, project: str) -> Item | Unknown:
        if not isinstance(item, Reasoning) or item.encrypted_content:
            return item
        text = "".join(part.text for part in item.content or () if isinstance(part, ReasoningText))
        payload = msgspec.json.encode(SealedContent("", text))
        sealed = self._sealer.seal(payload, project=project, purpose=_PURPOSE)
        return msgspec.structs.replace(item, encrypted_content=sealed)

    def seal_page(self, page: ItemPage, *, project: str) -> ItemPage:
        return msgspec.structs.replace(page, data=[self.seal_item(item, project=project) for item in page.data])

    def seal_response(self, response: Response, *, project: str) -> Response:
        output = [self.seal_item(item, project=project) for item in response.output]
        return msgspec.structs.replace(response, output=output)

    def seal_events(self, batch: Sequence[Event | Unknown], *, project: str) -> list[Event | Unknown]:
        return [self._seal_event(event, project) if event.type in _WITH_ITEMS else event for event in batch]

    def _seal_event(self, event: Event | Unknown, project: str) -> Event | Unknown:
        # Events from the event log are not decoded yet.
        decoded = codec.decode_event(event.raw) if isinstance(event, Unknown) else event
        if isinstance(decoded, OutputItemDone):
            return msgspec.structs.replace(decoded, item=self.seal_item(decoded.item, project=project))
        if isinstance(decoded, TERMINAL):
            return msgspec.structs.replace(decoded, response=self.seal_response(decoded.response, project=project))
        return event


_WITH_ITEMS = frozenset(kind.__struct_config__.tag for kind in (OutputItemDone, *TERMINAL))


class SealedReasoning(Stage):
    """Opens sealed reasoning for the backend, and seals the reasoning of its answer for the client."""

    def __init__(self, inner: Backend, *, name: str, sealer: Sealer) -> None:
        super().__init__(inner)
        self._name = name
        self._sealer = sealer

    async def count_tokens(self, turn: Turn) -> int:
        opened = self._open_seals(turn) if not offload.is_large() else await offload.run(self._open_seals, turn)
        try:
            return await self.inner.count_tokens(opened)
        except InvalidRequest as error:
            self._correct_param(error, opened)
            raise

    async def stream(self, turn: Turn) -> Deltas:
        opened = self._open_seals(turn) if not offload.is_large() else await offload.run(self._open_seals, turn)
        try:
            answer = await self.inner.stream(opened)
        except InvalidRequest as error:
            self._correct_param(error, opened)
            raise
        if not self.capabilities.reasoning:
            return answer
        collector = _ReasoningCollector(self._name, always=_WANTED in (turn.request.include or ()))
        return _SealedDeltas(answer, collector, partial(self._seal, turn.project))

    def _seal(self, project: str, content: SealedContent) -> deltas.ReasoningSeal:
        return deltas.ReasoningSeal(self._sealer.seal(msgspec.json.encode(content), project=project, purpose=_PURPOSE))

    def _correct_param(self, error: InvalidRequest, turn: Turn) -> None:
        """Name the client's item in an error that names one of the turn's items by its index."""
        if not self.capabilities.any_tool:  # such a backend forwards items to a server that counts them itself
            rewrite_backend_error(error, turn)

    def _open_seals(self, turn: Turn) -> Turn:
        if Reasoning not in map(type, turn.items):
            return turn
        opened = [self._open_item(item, turn.project) for item in turn.items]
        return msgspec.structs.replace(turn, items=[item for item in opened if item is not None])

    def _open_item(self, item: Item | Unknown, project: str) -> Item | Unknown | None:
        if not isinstance(item, Reasoning) or not item.encrypted_content:
            return item
        sealed = _open(item, self._sealer, project) or SealedContent("")
        opaque = sealed.opaque if sealed.backend == self._name else None
        content = [ReasoningText(sealed.text)] if sealed.text else item.content
        if not (opaque or content or item.summary):
            return None
        item_id = sealed.upstream_id if opaque and sealed.upstream_id else item.id
        return msgspec.structs.replace(item, id=item_id, content=content, encrypted_content=opaque)


_REASONING_DELTAS = frozenset({deltas.Reasoning, deltas.ReasoningSummary, deltas.ReasoningSeal})
# Deltas that do not end a stretch of reasoning.
_BETWEEN_REASONING = (deltas.TokenUsage, deltas.Passthrough, deltas.NewPart, deltas.Amend, deltas.ItemPassthrough)


class _ReasoningCollector:
    """Collects one stretch of reasoning. Without `always`, only reasoning with opaque state is sealed."""

    def __init__(self, backend: str, *, always: bool) -> None:
        self._backend = backend
        self._always = always
        self._texts: list[str] = []
        self.is_empty = True

    def add(self, delta: Delta) -> SealedContent | None:
        """Return the reasoning to seal, if a stretch ends with this delta or right before it."""
        if isinstance(delta, deltas.ReasoningSeal):
            return self._close(delta.encrypted_content, delta.upstream_id)
        if isinstance(delta, deltas.Reasoning | deltas.ReasoningSummary):
            self.is_empty = False
            if isinstance(delta, deltas.Reasoning):
                self._texts.append(delta.text)
            return None
        if self.is_empty or isinstance(delta, _BETWEEN_REASONING):
            return None
        content = self._close(None)
        return content if self._always else None

    def _close(self, opaque: str | None, upstream_id: str = "") -> SealedContent:
        content = SealedContent(self._backend, "".join(self._texts), opaque, upstream_id)
        self._texts.clear()
        self.is_empty = True
        return content


class _SealedDeltas:
    """The deltas of a backend, with its reasoning sealed by `seal`. A plain iterator, because each read passes it."""

    def __init__(
        self,
        answer: Deltas,
        collector: _ReasoningCollector,
        seal: Callable[[SealedContent], deltas.ReasoningSeal],
    ) -> None:
        self._answer = answer
        self._collector = collector
        self._seal = seal
        self.aclose = answer.aclose

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        while True:
            batch = await anext(self._answer)
            if self._collector.is_empty and _REASONING_DELTAS.isdisjoint(map(type, batch)):  # the usual case
                return batch
            try:
                sealed = self._seal_batch(batch)
            except BaseException:
                await self.aclose()
                raise
            if sealed:
                return sealed

    def _seal_batch(self, batch: Sequence[Delta]) -> list[Delta]:
        sealed: list[Delta] = []
        for delta in batch:
            content = self._collector.add(delta)
            if content is not None:
                sealed.append(self._seal(content))
            if not isinstance(delta, deltas.ReasoningSeal):
                sealed.append(delta)
        return sealed
