"""The engine: every model, one store, and the operations of the Responses API on them."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from antiphon.backends.base import Backend, Model
from antiphon.engine.conversation import resolve
from antiphon.engine.keeping import ForegroundKeeper
from antiphon.engine.parameters import check_parameters
from antiphon.engine.policy import Policy
from antiphon.engine.run import Run
from antiphon.engine.truncation import start_turn
from antiphon.errors import InvalidRequest, ModelNotFound, NotFound, Unavailable
from antiphon.protocol.items import Item
from antiphon.protocol.open import Unknown
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Response
from antiphon.store.base import Store, StoredResponse


class ItemPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items, as the API lists them."""

    object: Literal["list"] = "list"
    data: list[Item | Unknown]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Engine:
    """Answers requests. It owns its backends and its store: `start` opens them, `close` closes them."""

    def __init__(self, *, backends: Mapping[str, Backend], store: Store, policy: Policy | None = None) -> None:
        self._backends = backends
        self._store = store
        self._policy = policy or Policy()
        self._by_model: dict[str, Backend] = {}
        self._models: list[Model] = []
        self._running: dict[tuple[str, str], Run] = {}
        self._stopping = False
        self.ready = False

    async def start(self) -> None:
        await self._store.open()
        for backend in self._backends.values():
            await backend.start()
            for model in backend.models():
                if model.id not in self._by_model:
                    self._by_model[model.id] = backend
                    self._models.append(model)
        self.ready = True

    async def close(self) -> None:
        self.ready = False
        for backend in self._backends.values():
            await backend.close()
        await self._store.close()

    def models(self) -> Sequence[Model]:
        return self._models

    async def create(self, request: CreateRequest, *, project: str) -> Run:
        """Begin a response. What can be refused is refused here, before there is anything to stream."""
        if self._stopping:
            raise Unavailable("The server is shutting down.")
        check_parameters(request)
        model = request.model or ""
        backend = self._find_backend(model)
        resolved = await resolve(
            request,
            project=project,
            model=model,
            capabilities=backend.capabilities,
            store=self._store,
            policy=self._policy,
        )
        started = await start_turn(backend, resolved.turn)
        if started.dropped:
            resolved.warnings.append(f"truncation: the {started.dropped} oldest items were left out")
        keeper = ForegroundKeeper(self._store, self._policy, project=project, asked=resolved.input)
        return self._register(Run(resolved, started.deltas, keeper), project)

    def _register(self, run: Run, project: str) -> Run:
        """Know the run by its id for as long as it lasts."""
        key = (project, run.response.id)
        self._running[key] = run
        run.on_end(lambda: self._running.pop(key, None))
        return run

    def stop_runs(self) -> None:
        """Take no new requests, and end the running ones with a terminal event."""
        self._stopping = True
        for run in tuple(self._running.values()):
            run.stop()

    async def retrieve(self, project: str, response_id: str) -> Response:
        return (await self._load(project, response_id)).response

    async def delete(self, project: str, response_id: str) -> None:
        if not await self._store.delete(project, response_id):
            raise _not_found(response_id)

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
        return ItemPage(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=start + limit < len(items),
        )

    async def _load(self, project: str, response_id: str) -> StoredResponse:
        stored = await self._store.load(project, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored

    def _find_backend(self, model: str) -> Backend:
        backend = self._by_model.get(model)
        if backend is None:
            known = ", ".join(f"'{known}'" for known in self._by_model)
            raise ModelNotFound(f"The model '{model}' does not exist. There is {known}.", param="model")
        return backend


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")
