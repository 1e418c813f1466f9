"""The engine: every model, one store, and the operations of the Responses API on them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from antiphon.backends.base import Backend, Deltas, Model, Turn
from antiphon.engine.attempt import QueuedRequest
from antiphon.engine.background import Background, BackgroundRun
from antiphon.engine.context import fetch_context
from antiphon.engine.conversation import Resolved, resolve
from antiphon.engine.conversations import Conversations
from antiphon.engine.items import ItemPage, make_page
from antiphon.engine.keeping import ForegroundKeeper, expiry
from antiphon.engine.parameters import check_parameters
from antiphon.engine.policy import Policy
from antiphon.engine.prompts import Prompts
from antiphon.engine.repair import repair
from antiphon.engine.retention import Retention
from antiphon.engine.run import Events, Run
from antiphon.engine.stateless import StatelessRun, leave_state_aside
from antiphon.engine.truncation import start_turn
from antiphon.errors import InvalidRequest, ModelNotFound, NotFound, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import FINAL_STATUSES, Response
from antiphon.store.base import RunKey, Store, StoredResponse

logger = logging.getLogger(__name__)


class Engine:
    """Answers requests. It owns its backends and its store: `start` opens them, `close` closes them."""

    def __init__(self, *, backends: Mapping[str, Backend], store: Store, policy: Policy | None = None) -> None:
        self._backends = backends
        self._store = store
        self._policy = policy or Policy()
        self._served: dict[str, tuple[Backend, Model]] = {}
        self._running: dict[RunKey, Run] = {}
        self._background = Background(
            store,
            slots=self._policy.background_slots,
            lease=self._policy.background_lease_seconds,
            make_turn=self._make_turn,
            start_turn=self._start_turn,
        )
        self.conversations = Conversations(store, self._policy)
        self.prompts = Prompts(store)
        self._retention = Retention(store)
        self._stopping = False
        self.ready = False

    async def start(self) -> None:
        await self._store.open()
        for backend in self._backends.values():
            await backend.start()
            for model in backend.models():
                self._served.setdefault(model.id, (backend, model))
        await self._background.start()
        self._retention.start()
        self.ready = True

    async def close(self) -> None:
        self.ready = False
        await self._retention.close()
        await self._background.close()
        for backend in self._backends.values():
            await backend.close()
        await self._store.close()

    def models(self) -> Sequence[Model]:
        return [model for _, model in self._served.values()]

    async def create(self, request: CreateRequest, *, project: str) -> Run | BackgroundRun:
        """Begin a response. What can be refused is refused here, before there is anything to stream."""
        if self._stopping:
            raise Unavailable("The server is shutting down.")
        resolved = await self._resolve(request, project)
        if resolved.response.background:
            return await self._enqueue(resolved, project)
        started = await start_turn(self._find_backend(resolved.turn), resolved.turn)
        if started.dropped:
            resolved.warnings.insert(0, f"truncation: the {started.dropped} oldest items were left out")
        keeper = ForegroundKeeper(self._store, self._policy, project=project, asked=resolved.input)
        make_run = StatelessRun if self._policy.stateless else Run
        run = make_run(resolved, started.deltas, keeper)
        key = RunKey(project, run.response.id)
        self._running[key] = run
        run.on_end(lambda: self._running.pop(key, None))
        return run

    async def count_input_tokens(self, request: CreateRequest, *, project: str) -> int:
        """How many tokens the model would read for this request."""
        resolved = await self._resolve(request, project)
        return await self._find_backend(resolved.turn).count_tokens(resolved.turn)

    async def cancel(self, project: str, response_id: str) -> Response:
        """End a response that is under way, and give it as it is then. One that has ended stays as it is."""
        key = RunKey(project, response_id)
        run = self._running.get(key)
        if run is not None:
            await run.end_by_cancelling()
            return run.response
        stored = await self._load(project, response_id)
        if stored.response.status in FINAL_STATUSES:
            return stored.response
        await self._background.cancel(key)
        return (await self._load(project, response_id)).response

    async def follow(self, project: str, response_id: str, *, after: int) -> Events:
        """The events of a background response beyond this number, and then those to come."""
        stored = await self._load(project, response_id)
        if not stored.response.background:
            raise InvalidRequest(
                "Only the stream of a background response can be read again: create it with 'background: true'.",
                param="stream",
                code="invalid_value",
            )
        return self._background.follow(RunKey(project, response_id), after)

    def stop_runs(self) -> None:
        """Take no new requests, and end the running ones with a terminal event. Background runs go on another day."""
        self._stopping = True
        self._background.dismiss_readers()
        for run in tuple(self._running.values()):
            run.stop()

    async def _resolve(self, request: CreateRequest, project: str) -> Resolved:
        ignored: list[str] = []
        if self._policy.stateless:
            request, ignored = leave_state_aside(request)
        request = await self.prompts.fill_in(request, project)
        check_parameters(request)
        served = self._served.get(request.model or "")
        if served is None:
            known = ", ".join(f"'{known}'" for known in self._served)
            raise ModelNotFound(f"The model '{request.model}' does not exist. There is {known}.", param="model")
        backend, model = served
        resolved = await resolve(
            request,
            project=project,
            model=model,
            capabilities=backend.capabilities,
            store=self._store,
            policy=self._policy,
        )
        resolved.warnings[:0] = ignored
        return resolved

    async def _enqueue(self, resolved: Resolved, project: str) -> BackgroundRun:
        response = msgspec.structs.replace(resolved.response, status="queued")
        queued = QueuedRequest(request=resolved.turn.request, minted=resolved.mint.minted)
        stored = StoredResponse(response=response, input=resolved.input, expires_at=expiry(self._policy))
        await self._store.enqueue(project, stored, codec.encode(queued))
        self._background.wake()
        key = RunKey(project, response.id)
        return BackgroundRun(response, resolved.warnings, lambda: self._background.follow(key, -1))

    async def _make_turn(self, queued: QueuedRequest, asked: Sequence[Item | Unknown], key: RunKey) -> Turn:
        """The turn of a queued request, on whatever it continues as that is now."""
        context = await fetch_context(queued.request, project=key.project, store=self._store, inherit_tools=False)
        # Another turn may have come in between: what was sound when it was queued may not be so any more.
        mended = repair([*context.items, *asked])
        for each in (*context.repairs, *mended.repairs):
            logger.warning("history: %s", each, extra={"response_id": key.response_id})
        return Turn(request=queued.request, items=mended.items)

    async def _start_turn(self, turn: Turn, key: RunKey) -> Deltas:
        started = await start_turn(self._find_backend(turn), turn)
        if started.dropped:
            told = "truncation: the %d oldest items were left out"
            logger.warning(told, started.dropped, extra={"response_id": key.response_id})
        return started.deltas

    def _find_backend(self, turn: Turn) -> Backend:
        model = turn.request.model or ""
        if model not in self._served:  # a queued request may name a model that is no longer configured
            raise ModelNotFound(f"The model '{model}' does not exist.", param="model")
        return self._served[model][0]

    async def retrieve(self, project: str, response_id: str) -> Response:
        """The response as it is now; one that a client still waits for here comes into the store at its end."""
        stored = await self._store.load(project, response_id)
        if stored is not None:
            return stored.response
        run = self._running.get(RunKey(project, response_id))
        if run is None or not run.begun.store:
            raise _not_found(response_id)
        return run.begun

    async def delete(self, project: str, response_id: str) -> None:
        if not await self._store.delete(project, response_id):
            raise _not_found(response_id)
        self._background.stop(RunKey(project, response_id))

    async def input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> ItemPage:
        """The response's own input items, a page at a time."""
        items = (await self._load(project, response_id)).input
        if order == "desc":
            items = items[::-1]
        start = 0
        if after is not None:
            start = next((index + 1 for index, item in enumerate(items) if item.id == after), 0)
            if start == 0:
                raise InvalidRequest(f"No item with id '{after}' in this list.", param="after", code="invalid_value")
        page = items[start : start + limit]
        return make_page(page, has_more=start + limit < len(items))

    async def _load(self, project: str, response_id: str) -> StoredResponse:
        stored = await self._store.load(project, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")
