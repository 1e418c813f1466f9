"""Routing: candidates for a model, and fallbacks."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.engine.serve.routing import ModelRouter
from antiphon.errors import (
    AntiphonError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    RateLimited,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
)
from antiphon.protocol.content import InputImage
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest, ReasoningConfig
from antiphon.protocol.tools import FileSearchTool, FunctionTool, WebSearchTool
from antiphon.stream.deltas import Delta, Deltas, Finish, Text


class Station:
    """A backend that answers with its own name or an error."""

    def __init__(
        self, name: str, *models: str, any_model: bool = False, error: AntiphonError | None = None, **able: Any
    ) -> None:
        self.capabilities = Capabilities(any_model=any_model, **able)
        self.models_called: list[str | None] = []
        self._name = name
        self._error = error
        self.list: Sequence[Model] = [Model(id=model, created=0, owned_by=name) for model in models]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def models(self) -> Sequence[Model]:
        return self.list

    async def count_tokens(self, turn: Turn) -> int:
        self.models_called.append(turn.request.model)
        return 1

    async def stream(self, turn: Turn) -> Deltas:
        self.models_called.append(turn.request.model)
        if self._error is not None:
            raise self._error
        return self._answer()

    async def _answer(self) -> AsyncGenerator[Sequence[Delta], None]:
        yield [Text(self._name), Finish()]


def make_router(*stations: tuple[str, Backend], names: Mapping[str, Sequence[str]] | None = None) -> ModelRouter:
    return ModelRouter(dict(stations), names or {})


def turn(model: str) -> Turn:
    return Turn(request=CreateRequest(model=model), items=[])


async def ask(router: ModelRouter, model: str) -> tuple[str, str]:
    """Return the backend that answered and the one that the route reports."""
    serving = await router.find(model).start(turn(model))
    produced = [delta async for batch in serving.deltas for delta in batch]
    assert isinstance(produced[0], Text)
    return produced[0].text, serving.candidate.address


async def test_listed_model_is_served_by_first_backend_that_lists_it() -> None:
    router = make_router(("a", Station("a", "one")), ("b", Station("b", "one", "two")))
    assert await ask(router, "one") == ("a", "a/one")
    assert await ask(router, "two") == ("b", "b/two")
    assert [model.id for model in router.models()] == ["one", "two"]


async def test_model_can_be_named_with_its_backend() -> None:
    router = make_router(("a", Station("a", "one")), ("b", Station("b", "one", "org/two")))
    assert await ask(router, "b/one") == ("b", "b/one")
    assert await ask(router, "b/org/two") == ("b", "b/org/two")
    assert await ask(router, "org/two") == ("b", "b/org/two")


async def test_unlisted_name_goes_to_backend_for_any_model() -> None:
    router = make_router(("a", Station("a", "one")), ("b", Station("b", any_model=True)))
    assert await ask(router, "new") == ("b", "b/new")


def test_model_name_is_listed_unlisted_or_unknown() -> None:
    names = {"fast": ["b/swift"], "x-*": ["b"], "one*": ["b", "a/one"]}
    router = make_router(("a", Station("a", "one")), ("b", Station("b", "two", any_model=True)), names=names)
    emitted = {name: router.classify(name) for name in ("one", "a/one", "b/two", "fast", "one-more")}
    assert emitted == dict.fromkeys(emitted, "listed")
    emitted = {name: router.classify(name) for name in ("new", "b/new", "x-ray")}
    assert emitted == dict.fromkeys(emitted, "unlisted")
    assert make_router(("a", Station("a", "one"))).classify("new") == "unknown"


@pytest.mark.parametrize("model", ["new", "a/new", ""])
def test_unserved_name_is_not_found_and_others_are_listed(model: str) -> None:
    router = make_router(("a", Station("a", "one")), names={"fast": ["a/one"], "x-*": ["a"]})
    with pytest.raises(ModelNotFound) as caught:
        router.find(model)
    assert caught.value.message == f"The model '{model}' does not exist. Available models: 'one', 'fast'."


async def test_alias_is_served_under_backends_model_name() -> None:
    station = Station("a", "qwen3-8b")
    router = make_router(("a", station), names={"fast": ["a/qwen3-8b"]})
    assert await ask(router, "fast") == ("a", "a/qwen3-8b")
    assert await router.find("fast").count_tokens(turn("fast")) == 1
    assert station.models_called == ["qwen3-8b", "qwen3-8b"]


async def test_pattern_matches_names_and_plain_name_has_priority() -> None:
    names = {"gpt-*": ["a"], "gpt-5": ["b/other"]}
    router = make_router(("a", Station("a", any_model=True)), ("b", Station("b", any_model=True)), names=names)
    assert await ask(router, "gpt-4o") == ("a", "a/gpt-4o")
    assert await ask(router, "gpt-5") == ("b", "b/other")


def test_unknown_target_backend_is_config_error() -> None:
    with pytest.raises(ConfigError, match=r"models.fast: there is no backend 'nowhere'. Known backends: a."):
        make_router(("a", Station("a")), names={"fast": ["nowhere/one"]})


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("slow down"),
        UpstreamError("reset"),
        UpstreamTimeout("late"),
        Unavailable("open circuit"),
        ModelNotFound("not there"),
    ],
)
async def test_next_candidate_serves_when_first_fails(error: AntiphonError) -> None:
    router = make_router(("a", Station("a", error=error)), ("b", Station("b")), names={"m": ["a/x", "b/y"]})
    assert await ask(router, "m") == ("b", "b/y")


async def test_invalid_request_is_not_tried_on_next_candidate() -> None:
    second = Station("b")
    router = make_router(("a", Station("a", error=InvalidRequest("bad"))), ("b", second), names={"m": ["a", "b"]})
    with pytest.raises(InvalidRequest, match="bad"):
        await ask(router, "m")
    assert second.models_called == []


async def test_last_error_is_raised_when_all_candidates_fail() -> None:
    stations: list[tuple[str, Any]] = [
        ("a", Station("a", error=UpstreamError("first"))),
        ("b", Station("b", error=RateLimited("second", retry_after=3))),
    ]
    router = make_router(*stations, names={"m": ["a", "b"]})
    with pytest.raises(RateLimited) as caught:
        await ask(router, "m")
    assert (caught.value.message, caught.value.retry_after) == ("second", 3)


class SendingStation(Station):
    """A backend that notes if an earlier call may have begun, and sends its own."""

    async def stream(self, turn: Turn) -> Deltas:
        self.is_sent_before = turn.progress.is_sent
        turn.progress.mark_sent()
        return await super().stream(turn)


async def test_call_of_a_failed_candidate_is_not_sent_any_more() -> None:
    stations = [SendingStation("a", error=UpstreamError("down")), SendingStation("b")]
    router = make_router(("a", stations[0]), ("b", stations[1]), names={"m": ["a", "b"]})
    assert await ask(router, "m") == ("b", "b/m")
    assert [station.is_sent_before for station in stations] == [False, False]


FUNCTIONS = frozenset({"function"})
FUNCTION, SEARCH, FILES = FunctionTool("f"), WebSearchTool(), FileSearchTool(["v"])
PICTURE = Message("user", [InputImage(image_url="data:image/png;base64,aGk=")])


def make_stations(**able: Any) -> ModelRouter:
    """A route with an unavailable backend and a fallback."""
    down = Station("a", error=UpstreamError("down"), any_tool=True, images=True, logprobs=True)
    return make_router(("a", down), ("b", Station("b", **able)), names={"m": ["a/x", "b/y"]})


async def test_unsupported_tools_are_dropped_for_fallback_with_warning() -> None:
    router = make_stations(tools=FUNCTIONS)
    requested = Turn(request=CreateRequest(model="m", tools=[SEARCH, FUNCTION]), items=[])
    serving = await router.find("m").start(requested)
    assert serving.warnings == ["tools[0]: web_search is not available here and was left out"]
    assert serving.candidate.address == "b/y"


@pytest.mark.parametrize(
    ("request_", "items"),
    [
        (CreateRequest(model="m", tools=[FILES]), []),
        (CreateRequest(model="m", tools=[SEARCH], tool_choice="required"), []),
        (CreateRequest(model="m", top_logprobs=2), []),
        (CreateRequest(model="m"), [PICTURE]),
    ],
)
async def test_candidate_without_needed_capability_is_skipped(request_: CreateRequest, items: list[Any]) -> None:
    router = make_stations(tools=FUNCTIONS)
    with pytest.raises(UpstreamError, match="down"):
        await router.find("m").start(Turn(request=request_, items=items))


async def test_unsupported_refusal_of_fallback_tries_next_candidate() -> None:
    unable = Station("b", error=InvalidRequest("No sound.", code="unsupported_content"))
    stations: list[tuple[str, Any]] = [("a", Station("a", error=UpstreamError("down"))), ("b", unable)]
    router = make_router(*stations, ("c", Station("c")), names={"m": ["a", "b", "c"], "n": ["a", "b"]})
    assert await ask(router, "m") == ("c", "c/m")
    with pytest.raises(UpstreamError, match="down"):
        await ask(router, "n")


async def test_models_discovered_later_are_served() -> None:
    station = Station("a", "one")
    router = make_router(("a", station))
    assert [model.id for model in router.models()] == ["one"]
    station.list = [Model(id="two", created=0, owned_by="a")]
    assert await ask(router, "two") == ("a", "a/two")


def test_backend_window_applies_to_unlisted_models() -> None:
    router = make_router(("a", Station("a", "one", any_model=True, context_window=4_000)), names={"alias": ["a/two"]})
    found = [router.find(name).first.model for name in ("one", "two", "a/three", "alias")]
    assert [(model.id, model.context_window) for model in found] == [
        ("one", None),
        ("two", 4_000),
        ("three", 4_000),
        ("two", 4_000),
    ]


async def test_parameter_found_ineffective_is_warned_about_once() -> None:
    station = Station("a", "one")
    station.capabilities = Capabilities(
        list_ignored=lambda _, model: ["user", *(["reasoning"] if station.models_called else [])]
    )
    route = make_router(("a", station)).find("one")
    requested = Turn(request=CreateRequest(model="one", reasoning=ReasoningConfig(effort="low")), items=[])
    notes = [(await route.start(requested)).warnings for _ in range(2)]
    assert notes == [["no effect on this model: reasoning"], []]
