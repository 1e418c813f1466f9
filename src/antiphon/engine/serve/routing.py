"""Routing: from a model's name to the backends that serve it, in the order in which they are tried."""

import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import call
from typing import Literal

import msgspec

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.config.settings import UnsupportedTools
from antiphon.engine.prepare.parameters import check_capabilities, check_media
from antiphon.engine.prepare.toolset import select_tools
from antiphon.engine.serve.compaction.expansion import strip_compaction
from antiphon.engine.serve.stage import Stage
from antiphon.errors import (
    AntiphonError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
)
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas, Served

logger = logging.getLogger(__name__)

# A model name is listed by a backend or the settings, accepted by a backend that lists no models, or unknown.
ModelStatus = Literal["listed", "unlisted", "unknown"]

# Errors that another candidate may not have. Any other refusal is caused by the request itself.
_RETRYABLE_ELSEWHERE = (ModelNotFound, RateLimited, Unavailable, UpstreamError)


class Candidate(msgspec.Struct, frozen=True):
    """A backend that can serve a model, and the model as that backend names it."""

    name: str
    backend: Backend
    model: Model

    @property
    def address(self) -> str:
        return f"{self.name}/{self.model.id}"

    @property
    def is_listed(self) -> bool:
        return any(each.id == self.model.id for each in self.backend.models())

    def list_ignored(self, request: CreateRequest) -> Sequence[str]:
        """Return the request's parameters that are known to have no effect on the model."""
        list_ignored = self.backend.capabilities.list_ignored
        return list_ignored(request, self.model.id) if list_ignored is not None else ()

    def describe_emulation(self, request: CreateRequest) -> list[str]:
        """Return warnings about the parts of a request that are emulated for the backend."""
        if request.tools is None and request.text is None:  # only tools and output formats are emulated
            return []
        return self.backend.describe_emulation(request) if isinstance(self.backend, Stage) else []


class Serving(msgspec.Struct, frozen=True):
    """A model call in progress, and warnings for the client.

    `candidate` is None if the model is not known yet. The deltas then name it with `Served`.
    """

    deltas: Deltas
    candidate: Candidate | None
    warnings: Sequence[str] = ()

    @property
    def served(self) -> Served | None:
        """The delta that names the model, if it is known."""
        return Served(self.candidate.model.id, self.candidate.name) if self.candidate is not None else None


class ModelRoute(msgspec.Struct, frozen=True):
    """The candidates for a model, in order. Requests are prepared for the first candidate's capabilities."""

    candidates: Sequence[Candidate]
    unsupported: UnsupportedTools = "default"

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    def start(self, turn: Turn) -> Awaitable[Serving]:
        """Start the turn on the first candidate that can serve it.

        Raises the error of the last candidate that was able to serve the turn.
        """
        return self._start_on(self.first, turn) if len(self.candidates) == 1 else self._start_on_any(turn)

    async def _start_on_any(self, turn: Turn) -> Serving:
        failed: AntiphonError | None = None
        for candidate in self.candidates:
            try:
                return await self._start_on(candidate, turn)
            except _RETRYABLE_ELSEWHERE as error:
                failed, reason = error, error.code
            except InvalidRequest as error:
                # After another candidate accepted the request, only a missing capability is a reason to go on.
                if failed is None or not (error.code or "").startswith("unsupported"):
                    raise
                reason = error.message
            except CandidateUnfit as error:
                reason = str(error)
            turn.progress.is_sent = False
            if candidate is not self.candidates[-1]:
                logger.warning("%s cannot serve the request (%s); trying the next target", candidate.address, reason)
        assert failed is not None, "the first candidate is always able to serve the turn"
        raise failed

    async def _start_on(self, candidate: Candidate, turn: Turn) -> Serving:
        warnings: Sequence[str] = ()
        if candidate is not self.first:
            capabilities = candidate.backend.capabilities
            turn, warnings = adapt(turn, capabilities, candidate.model.id, unsupported=self.unsupported)
            warnings = [*warnings, *candidate.describe_emulation(turn.request)]
        request = turn.request
        # Some backends learn only from a refusal that a model does not reason.
        ignored = candidate.list_ignored(request) if request.reasoning is not None else None
        deltas = await candidate.backend.stream(_address(turn, candidate.model.id))
        turn.progress.is_sent = True
        if ignored is not None and (found := [name for name in candidate.list_ignored(request) if name not in ignored]):
            warnings = [*warnings, f"no effect on this model: {', '.join(found)}"]
        return Serving(deltas, candidate, [*turn.warnings, *warnings])

    async def count_tokens(self, turn: Turn) -> int:
        """Count the tokens that the first candidate's model would read."""
        return await self.first.backend.count_tokens(_address(turn, self.first.model.id))


def _address(turn: Turn, model: str) -> Turn:
    """Return the turn as a backend gets it: with its own name of the model, and without compaction markers."""
    turn = strip_compaction(turn)
    if turn.request.model == model:
        return turn
    return msgspec.structs.replace(turn, request=msgspec.structs.replace(turn.request, model=model))


class CandidateUnfit(Exception):
    """The backend lacks a capability that the turn needs."""


def adapt(
    turn: Turn, capabilities: Capabilities, model: str, *, unsupported: UnsupportedTools
) -> tuple[Turn, list[str]]:
    """Return a turn that was prepared for another backend as this one can serve it, and warnings.

    Raises CandidateUnfit.
    """
    try:
        warnings = check_capabilities(turn.request, capabilities, model)
        check_media(turn.items, capabilities, model)
        tools, left_out = select_tools(
            turn.request, capabilities=capabilities, unsupported=unsupported, history=turn.items
        )
    except InvalidRequest as error:
        raise CandidateUnfit(error.message) from None
    if left_out:
        turn = msgspec.structs.replace(turn, request=msgspec.structs.replace(turn.request, tools=tools or None))
    return turn, [*warnings, *left_out]


class ModelRouter:
    """Finds the route of a model among all backends and the names that the settings define.

    `names` maps a name, or a pattern with `*`, to targets: `backend`, or `backend/model` if the backend has another
    name for the model.
    `unsupported` is the handling of tools that a fallback candidate cannot serve.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        names: Mapping[str, Sequence[str]],
        *,
        unsupported: UnsupportedTools = "default",
    ) -> None:
        self._backends = backends
        self._unsupported = unsupported
        self._names = {name: [parse_target(name, target, backends) for target in names[name]] for name in names}
        self._patterns = [name for name in names if "*" in name]
        self._listed: dict[str, ModelRoute] = {}
        self._lists: list[Sequence[Model]] = []
        self._model_lists = [backend.models for backend in backends.values()]

    def models(self) -> list[Model]:
        """Return all models that have a name, each once."""
        named = [
            msgspec.structs.replace(self.find(name).first.model, id=name)
            for name in self._names
            if name not in self._patterns
        ]
        listed = (route.first.model for route in self._index().values())
        return list({model.id: model for model in (*listed, *named)}.values())

    def find(self, model: str) -> ModelRoute:
        """Return the route of a model. Raises ModelNotFound."""
        targets = self._names.get(model)
        if targets is None and self._patterns:
            pattern = next((each for each in self._patterns if fnmatchcase(model, each)), None)
            targets = self._names[pattern] if pattern is not None else None
        if targets is not None:
            candidates = [self._make_candidate(backend, own_name or model) for backend, own_name in targets]
            return ModelRoute(candidates, self._unsupported)
        listed = self._index().get(model)
        if listed is not None:
            return listed
        candidate = self._find_unlisted(model)
        if candidate is None:
            known = ", ".join(f"'{known.id}'" for known in self.models())
            raise ModelNotFound(
                f"The model '{model}' does not exist. Available models: {known or 'none'}.", param="model"
            )
        return ModelRoute([candidate])

    def classify(self, model: str) -> ModelStatus:
        """Return the status of a model name. A name in the settings counts as listed."""
        try:
            route = self.find(model)
        except ModelNotFound:
            return "unknown"
        return "listed" if model in self._names or any(each.is_listed for each in route.candidates) else "unlisted"

    def _index(self) -> dict[str, ModelRoute]:
        lists = list(map(call, self._model_lists))
        if lists != self._lists:  # cheap while a backend returns the same list object
            listed: dict[str, ModelRoute] = {}
            for (name, backend), models in zip(self._backends.items(), lists, strict=True):
                for model in models:
                    listed.setdefault(model.id, ModelRoute([Candidate(name, backend, model)]))
            self._lists, self._listed = lists, listed
        return self._listed

    def _find_unlisted(self, model: str) -> Candidate | None:
        """Find a candidate for `backend/model`, or for any name on a backend that accepts unlisted models."""
        name, slash, own_name = model.partition("/")
        if slash and name in self._backends and self._serves(name, own_name):
            return self._make_candidate(name, own_name)
        for name, backend in self._backends.items():
            if backend.capabilities.any_model:
                return self._make_candidate(name, model)
        return None

    def _serves(self, name: str, model: str) -> bool:
        backend = self._backends[name]
        return backend.capabilities.any_model or any(each.id == model for each in backend.models())

    def _make_candidate(self, name: str, model: str) -> Candidate:
        backend = self._backends[name]
        found = next((each for each in backend.models() if each.id == model), None)
        if found is None:
            window = backend.capabilities.context_window
            found = Model(id=model, created=0, owned_by=name, context_window=window)
        return Candidate(name, backend, found)


def parse_target(name: str, target: str, backends: Collection[str]) -> tuple[str, str]:
    """Return the backend and the model of a target of the model `name`. Raises ConfigError for an unknown backend."""
    backend, _, model = target.partition("/")
    if backend not in backends:
        known = ", ".join(backends)
        raise ConfigError(f"models.{name}: there is no backend '{backend}'. Known backends: {known}.")
    return backend, model
