"""From a model's name to the backends that serve it, in the order in which they are asked."""

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.config import UnsupportedTools
from antiphon.engine.prepare.parameters import check_capabilities, check_media
from antiphon.engine.prepare.toolset import select_tools
from antiphon.engine.serve.strict_output import hold
from antiphon.engine.serve.truncation import count_tokens, start_turn
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


class Unfit(Exception):
    """The backend cannot do what the turn asks for."""


def adapt(
    turn: Turn, capabilities: Capabilities, model: str, *, unsupported: UnsupportedTools
) -> tuple[Turn, list[str]]:
    """The turn as this backend can serve it, and what is to be known about that. Raises Unfit."""
    try:
        warnings = check_capabilities(turn.request, capabilities, model)
        check_media(turn.items, capabilities, model)
        tools, left_out = select_tools(
            turn.request, capabilities=capabilities, unsupported=unsupported, history=turn.items
        )
    except InvalidRequest as error:
        raise Unfit(error.message) from None
    if left_out:
        turn = msgspec.structs.replace(turn, request=msgspec.structs.replace(turn.request, tools=tools or None))
    return turn, [*warnings, *left_out]


def lacks_something(error: InvalidRequest) -> bool:
    """Whether a backend refuses a request for what it cannot do itself, rather than for what it is."""
    return (error.code or "").startswith("unsupported")


logger = logging.getLogger(__name__)

# What a model's name is to us: one that we have, one that an upstream may have, or one that nobody here has.
Standing = Literal["listed", "passed on", "unknown"]

# What another backend may do better. A request that one of them refuses is at fault itself.
_PASSING = (ModelNotFound, RateLimited, Unavailable, UpstreamError)


class Candidate(msgspec.Struct, frozen=True):
    """A backend, and what the model is called there."""

    name: str
    backend: Backend
    model: Model

    @property
    def address(self) -> str:
        return f"{self.name}/{self.model.id}"

    def list_ignored(self, request: CreateRequest) -> Sequence[str]:
        """Which parameters of a request are known to have no effect on the model."""
        list_ignored = self.backend.capabilities.list_ignored
        return list_ignored(request, self.model.id) if list_ignored is not None else ()

    @property
    def listed(self) -> bool:
        return any(each.id == self.model.id for each in self.backend.models())


class Serving(msgspec.Struct, frozen=True):
    """A turn under way: who serves it, how many items it had to leave out, and what else is to be known."""

    deltas: Deltas
    candidate: Candidate
    dropped: int
    warnings: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        """What is to be known about it."""
        shortened = [f"truncation: the {self.dropped} oldest items were left out"] if self.dropped else []
        return [*shortened, *self.warnings]

    @property
    def told(self) -> Served:
        return Served(self.candidate.model.id, self.candidate.name)


class Route(msgspec.Struct, frozen=True):
    """Who serves a model: the first that can. The turns are made for the very first of them."""

    candidates: Sequence[Candidate]
    unsupported: UnsupportedTools = "default"

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    async def start(self, turn: Turn) -> Serving:
        """Begin the turn. Raises what the last of the candidates raised that could have served it."""
        failed: AntiphonError | None = None
        for candidate in self.candidates:
            try:
                return await self._ask(candidate, turn)
            except _PASSING as error:
                failed, told = error, error.code
            except InvalidRequest as error:
                # What was well enough for another one is not at fault itself.
                if failed is None or not lacks_something(error):
                    raise
                told = error.message
            except Unfit as error:
                told = str(error)
            if candidate is not self.candidates[-1]:
                logger.warning("%s cannot answer (%s): the next one is asked", candidate.address, told)
        assert failed is not None, "a route has candidates, and the first is asked for what it can do"
        raise failed

    async def _ask(self, candidate: Candidate, turn: Turn) -> Serving:
        warnings: Sequence[str] = ()
        if candidate is not self.first:
            able = candidate.backend.capabilities
            turn, warnings = adapt(turn, able, candidate.model.id, unsupported=self.unsupported)
        request = turn.request
        # That a model does not reason, some backends learn only by asking it to.
        idle = candidate.list_ignored(request) if request.reasoning is not None else None
        addressed = _address(turn, candidate.model.id)
        started = await start_turn(candidate.backend, addressed)
        if idle is not None and (found := [name for name in candidate.list_ignored(request) if name not in idle]):
            warnings = [*warnings, f"no effect on this model: {', '.join(found)}"]
        return Serving(hold(started.deltas, addressed, candidate.backend), candidate, started.dropped, warnings)

    async def count_tokens(self, turn: Turn) -> int:
        return await count_tokens(self.first.backend, _address(turn, self.first.model.id))


def _address(turn: Turn, model: str) -> Turn:
    if turn.request.model == model:
        return turn
    return msgspec.structs.replace(turn, request=msgspec.structs.replace(turn.request, model=model))


class Router:
    """Knows the models of all backends, and the names that the settings give to some of them.

    `names` maps a name, or a pattern with `*`, to targets: `backend`, or `backend/model` for another name there.
    `unsupported` is what becomes of tools that one who steps in for another cannot serve.
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
        self._names = {name: [_read_target(name, target, backends) for target in names[name]] for name in names}
        self._patterns = [name for name in names if "*" in name]
        self._listed: dict[str, Route] = {}
        self._lists: list[Sequence[Model]] = []

    def models(self) -> list[Model]:
        """What can be asked for by name, each once."""
        named = [
            msgspec.structs.replace(self.find(name).first.model, id=name)
            for name in self._names
            if name not in self._patterns
        ]
        listed = (route.first.model for route in self._index().values())
        return list({model.id: model for model in (*listed, *named)}.values())

    def find(self, model: str) -> Route:
        """Who serves a model of this name. Raises ModelNotFound."""
        targets = self._names.get(model)
        if targets is None:
            pattern = next((each for each in self._patterns if fnmatchcase(model, each)), None)
            targets = self._names[pattern] if pattern is not None else None
        if targets is not None:
            return Route([self._aim(backend, there or model) for backend, there in targets], self._unsupported)
        listed = self._index().get(model)
        if listed is not None:
            return listed
        candidate = self._find_unlisted(model)
        if candidate is None:
            known = ", ".join(f"'{known.id}'" for known in self.models())
            raise ModelNotFound(f"The model '{model}' does not exist. There is {known or 'none'}.", param="model")
        return Route([candidate])

    def classify(self, model: str) -> Standing:
        """What this name is here. It is listed if the settings name it, or if one of those who serve it lists it."""
        try:
            route = self.find(model)
        except ModelNotFound:
            return "unknown"
        return "listed" if model in self._names or any(each.listed for each in route.candidates) else "passed on"

    def _index(self) -> dict[str, Route]:
        lists = [backend.models() for backend in self._backends.values()]
        if lists != self._lists:  # of one that is still the same object, nothing is compared
            listed: dict[str, Route] = {}
            for (name, backend), models in zip(self._backends.items(), lists, strict=True):
                for model in models:
                    listed.setdefault(model.id, Route([Candidate(name, backend, model)]))
            self._lists, self._listed = lists, listed
        return self._listed

    def _find_unlisted(self, model: str) -> Candidate | None:
        """`backend/model`, or any name at all for a backend that answers for more models than it lists."""
        name, slash, there = model.partition("/")
        if slash and name in self._backends and self._serves(name, there):
            return self._aim(name, there)
        for name, backend in self._backends.items():
            if backend.capabilities.any_model:
                return self._aim(name, model)
        return None

    def _serves(self, name: str, model: str) -> bool:
        backend = self._backends[name]
        return backend.capabilities.any_model or any(each.id == model for each in backend.models())

    def _aim(self, name: str, model: str) -> Candidate:
        backend = self._backends[name]
        found = next((each for each in backend.models() if each.id == model), None)
        if found is None:
            window = backend.capabilities.context_window
            found = Model(id=model, created=0, owned_by=name, context_window=window)
        return Candidate(name, backend, found)


def _read_target(name: str, target: str, backends: Mapping[str, Backend]) -> tuple[str, str]:
    backend, _, model = target.partition("/")
    if backend not in backends:
        known = ", ".join(backends)
        raise ConfigError(f"models.{name}: there is no backend '{backend}'; there are: {known}.")
    return backend, model
