"""The engine: every model, one store, and the operations of the Responses API on them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from antiphon.backends.base import Backend, Model, Turn
from antiphon.engine.background.attempt import QueuedRequest, Ways
from antiphon.engine.background.queue import Background, BackgroundRun
from antiphon.engine.background.worker import Worker
from antiphon.engine.conversations import Conversations
from antiphon.engine.items import ItemPage, make_page, normalize_item
from antiphon.engine.policy import Policy
from antiphon.engine.prepare.history import load_history
from antiphon.engine.prepare.parameters import check_parameters
from antiphon.engine.prepare.prepare import Resolved, resolve
from antiphon.engine.prompts import Prompts
from antiphon.engine.respond.persistence import ForegroundKeeper, Retention, SessionKeeper, expiry
from antiphon.engine.respond.run import Events, Keeper, Run, prepare_only
from antiphon.engine.respond.session import Session
from antiphon.engine.respond.stateless import StatelessRun, leave_state_aside
from antiphon.engine.sealing import Sealer, make_secret
from antiphon.engine.serve.compaction.compactor import Compactor
from antiphon.engine.serve.compaction.expansion import expand_compactions, repair_before_trigger, strip_compaction
from antiphon.engine.serve.first_delta import LateDeltas, open_turn
from antiphon.engine.serve.routing import Route, Router, Serving
from antiphon.engine.serve.sealed_reasoning import LateSealer, ReasoningSealer, screen
from antiphon.engine.serve.tool_emulation.emulator import Emulator
from antiphon.errors import InvalidRequest, NotFound, Unavailable
from antiphon.protocol import codec
from antiphon.protocol.items import Item
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import FINAL_STATUSES, CompactedResponse, Response
from antiphon.protocol.unions import Unknown
from antiphon.store.base import RunKey, Store, StoredResponse
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)


class Engine:
    """Answers requests. It owns its backends and its store: `start` opens them, `close` closes them."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        store: Store,
        policy: Policy | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._sealer = sealer or Sealer([make_secret()])
        self._backends = {
            name: Emulator(ReasoningSealer(name, backend, self._sealer)) for name, backend in backends.items()
        }
        self._router = Router(self._backends, self._policy.models, unsupported=self._policy.unsupported_tools)
        self._compactor = Compactor(self._sealer)
        self._store = store
        self._running: dict[RunKey, Run] = {}
        ways = Ways(self._router.classify, self._make_turn, self._start_turn)
        worker = Worker(
            store,
            ways,
            slots=self._policy.background_slots,
            lease=self._policy.background_lease_seconds,
            limits=self._policy.background_limits,
        )
        self._background = Background(store, worker, lease=self._policy.background_lease_seconds)
        self.conversations = Conversations(store, self._policy)
        self.prompts = Prompts(store)
        self.reasoning = LateSealer(self._sealer)
        self._retention = Retention(store)
        self._stopping = False
        self.ready = False

    async def start(self) -> None:
        await self._store.open()
        for backend in self._backends.values():
            await backend.start()
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
        return self._router.models()

    async def create(
        self, request: CreateRequest, *, project: str, session: Session | None = None
    ) -> Run | BackgroundRun:
        """Begin a response. What can be refused is refused here, before there is anything to stream.

        A request on a connection with a memory comes with its `session`. What it fails to continue is forgotten there.
        """
        try:
            return await self._create(request, project, session)
        except Exception:
            if session is not None:
                session.forget(request.previous_response_id)
            raise

    async def _create(self, request: CreateRequest, project: str, session: Session | None) -> Run | BackgroundRun:
        if self._stopping:
            raise Unavailable("The server is shutting down.")
        resolved, route = await self._resolve(request, project, session)
        if resolved.response.background:
            return await self._enqueue(resolved, project)
        if request.generate is False:
            deltas = prepare_only()
        else:
            deltas = await self._open(resolved, route, streamed=bool(request.stream))
        keeper: Keeper = ForegroundKeeper(self._store, self._policy, project=project, asked=resolved.input)
        if session is not None:
            keeper = SessionKeeper(keeper, session, resolved)
        make_run = StatelessRun if self._policy.stateless else Run
        run = make_run(resolved, deltas, keeper)
        key = RunKey(project, run.response.id)
        self._running[key] = run
        run.on_end(lambda: self._running.pop(key, None))
        return run

    async def _open(self, resolved: Resolved, route: Route, *, streamed: bool) -> Deltas:
        """Begin the turn. What is known about it by then, the response says from the first."""
        compacting = await self._compactor.start(route, resolved.turn)
        if compacting is not None:
            return compacting
        turn = strip_compaction(resolved.turn)
        # A stream has other ways to tell of an error, so it need not stay silent until its model speaks.
        opened = await open_turn(route, turn, patience=self._policy.opening_seconds if streamed else None)
        if isinstance(opened, LateDeltas):
            return opened
        resolved.warnings[:0] = opened.notes
        emulated = self._backends[opened.candidate.name].describe(turn.request)
        resolved.warnings.extend(each for each in emulated if each not in resolved.warnings)
        resolved.response.model = opened.candidate.model.id
        resolved.response.served_by = opened.candidate.address
        return opened.deltas

    async def count_input_tokens(self, request: CreateRequest, *, project: str) -> tuple[int, list[str]]:
        """How many tokens the model would read for this request, and what should be known about it."""
        resolved, route = await self._resolve(request, project)
        return await route.count_tokens(strip_compaction(resolved.turn)), resolved.warnings

    async def compact(self, request: CreateRequest, *, project: str) -> tuple[CompactedResponse, list[str]]:
        """Compact what the request holds and continues, and say what should be known about it."""
        resolved, route = await self._resolve(request, project, mend=True)
        compacted = await self._compactor.compact(route, resolved.turn)
        mint = resolved.mint
        output = [normalize_item(item, mint) for item in (*compacted.retained, compacted.item)]
        # Nothing is kept under this id, so it does not look like that of a response.
        response = CompactedResponse(
            id=mint("compact"), created_at=int(resolved.response.created_at), output=output, usage=compacted.usage
        )
        return response, resolved.warnings

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

    async def _resolve(
        self, request: CreateRequest, project: str, session: Session | None = None, *, mend: bool = False
    ) -> tuple[Resolved, Route]:
        """The request made ready, and who serves it."""
        ignored: list[str] = []
        if self._policy.stateless:
            request, ignored = leave_state_aside(request, remembers=session is not None)
        own, request = request.input, await self.prompts.apply_template(request, project)
        check_parameters(request, client_input=own, on_websocket=session is not None, may_be_empty=mend)
        route = self._router.find(request.model or "")
        candidate = route.first
        resolved = await resolve(
            request,
            own=own,
            project=project,
            model=candidate.model,
            capabilities=candidate.backend.capabilities,
            store=self._store,
            policy=self._policy,
            sealer=self._sealer,
            session=session,
            mend=mend,
        )
        resolved.warnings[:0] = ignored
        resolved.warnings.extend(self._backends[candidate.name].describe(resolved.turn.request))
        return resolved, route

    async def _enqueue(self, resolved: Resolved, project: str) -> BackgroundRun:
        response = msgspec.structs.replace(resolved.response, status="queued")
        queued = QueuedRequest(request=resolved.turn.request, minted=resolved.mint.minted)
        stored = StoredResponse(response=response, input=resolved.input, expires_at=expiry(self._policy))
        await self._background.enqueue(project, stored, codec.encode(queued))
        key = RunKey(project, response.id)
        return BackgroundRun(response, resolved.warnings, lambda: self._background.follow(key, -1))

    async def _make_turn(self, queued: QueuedRequest, asked: Sequence[Item | Unknown], key: RunKey) -> Turn:
        """The turn of a queued request, on whatever it continues as that is now."""
        context = await load_history(
            queued.request, project=key.project, store=self._store, sealer=self._sealer, inherit_tools=False
        )
        # Another turn may have come in between: what was sound when it was queued may not be so any more.
        expanded = expand_compactions([*context.items, *asked], self._sealer, project=key.project)
        readable, unopened = screen(expanded.items, self._sealer, project=key.project)
        items, repairs = repair_before_trigger(readable)
        for each in (*context.repairs, *expanded.warnings, *unopened, *repairs):
            logger.warning("history: %s", each, extra={"response_id": key.response_id})
        return Turn(request=queued.request, items=items, project=key.project, response_id=key.response_id)

    async def _start_turn(self, turn: Turn, key: RunKey, told: Sequence[Delta]) -> Serving:
        # A queued request may name a model that is no longer configured: this raises then.
        route = self._router.find(turn.request.model or "")
        compacting = await self._compactor.start(route, turn, replayed=told)
        if compacting is not None:
            return Serving(compacting, route.first, 0)
        serving = await route.start(strip_compaction(turn))
        for note in serving.notes:
            logger.warning("%s", note, extra={"response_id": key.response_id})
        return serving

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
