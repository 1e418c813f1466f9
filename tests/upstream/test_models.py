import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.backends.base import Model
from antiphon.backends.upstream_backend import ModelCatalog
from support.upstream_server import STALL, Reply, json_of


@asynccontextmanager
async def catalogue_of(line: Any) -> AsyncIterator[ModelCatalog]:
    catalogue = ModelCatalog(line.upstream, owned_by="there", now=line.now)
    await catalogue.start()
    try:
        yield catalogue
    finally:
        await catalogue.close()


async def until_refreshed() -> None:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "models of there"))


def model(name: str, **details: Any) -> Model:
    return Model(**{"id": name, "created": 0, "owned_by": "there"} | details)


@pytest.mark.parametrize(
    ("listed", "models"),
    [
        (
            {"object": "list", "data": [{"id": "gpt", "object": "model", "created": 5, "owned_by": "openai"}]},
            [model("gpt", created=5, owned_by="openai")],
        ),
        ({"data": [{"id": "vllm", "max_model_len": 8192}]}, [model("vllm", context_window=8192)]),
        ({"data": [{"id": "router", "context_length": 9.5}]}, [model("router")]),
        ({"data": [{"id": "router", "context_length": 200000}]}, [model("router", context_window=200000)]),
        (
            {"models": [{"name": "x", "model": "x"}], "data": [{"id": "llama", "meta": {"n_ctx_train": 2048}}]},
            [model("llama", context_window=2048)],
        ),
        (
            {"data": [{"id": "llama", "meta": {"n_ctx_train": 2048, "n_ctx": 512}}]},
            [model("llama", context_window=512)],
        ),
        (
            {"data": [{"type": "model", "id": "claude", "created_at": "2025-02-19T00:00:00Z"}], "has_more": False},
            [model("claude", created=1739923200)],
        ),
        ({"models": [{"name": "qwen:7b", "modified_at": "yesterday"}]}, [model("qwen:7b")]),
        ([{"id": "a"}, {"id": "b"}, {"id": "a"}, {"id": ""}, {}, "c"], [model("a"), model("b")]),
        ({"data": None}, []),
        ("models", []),
    ],
)
async def test_the_list_is_read_in_any_of_the_usual_shapes(connect: Any, listed: Any, models: list[Model]) -> None:
    async with connect(json_of(listed)) as line, catalogue_of(line) as catalogue:
        assert list(catalogue.models()) == models
        assert line.server.requests[0].path == "/v1/models"


async def test_a_window_that_is_set_counts_more_than_one_that_is_listed(connect: Any) -> None:
    async with (
        connect(json_of({"data": [{"id": "a", "max_model_len": 8}]}), context_window=4) as line,
        catalogue_of(line) as catalogue,
    ):
        assert list(catalogue.models()) == [model("a", context_window=4)]


async def test_models_that_are_named_are_not_asked_for(connect: Any) -> None:
    async with connect(models=["b", "a", "b"]) as line, catalogue_of(line) as catalogue:
        line.time += 1000
        assert list(catalogue.models()) == [model("b"), model("a")]
        assert line.server.requests == []


async def test_an_old_list_is_shown_and_asked_for_again(connect: Any) -> None:
    async with connect(json_of([{"id": "old"}]), json_of([{"id": "new"}])) as line, catalogue_of(line) as catalogue:
        line.time += 59
        assert [each.id for each in catalogue.models()] == ["old"]
        line.time += 1
        assert [each.id for each in catalogue.models()] == ["old"]
        await until_refreshed()
        assert [each.id for each in catalogue.models()] == ["new"]
        assert len(line.server.requests) == 2


async def test_a_server_that_is_down_does_not_keep_us_from_starting(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="antiphon"):
        async with connect(Reply(status=500), json_of([{"id": "a"}])) as line, catalogue_of(line) as catalogue:
            assert list(catalogue.models()) == []
            line.time += 60
            assert list(catalogue.models()) == []
            await until_refreshed()
            assert list(catalogue.models()) == [model("a")]
    assert caplog.messages == ["backend there: its models could not be listed: The upstream failed (status 500)."]


async def test_what_was_known_stays_when_asking_fails(connect: Any) -> None:
    async with (
        connect(json_of([{"id": "a"}]), Reply(status=500), json_of([{"id": "b"}])) as line,
        catalogue_of(line) as catalogue,
    ):
        line.time += 60
        await catalogue.refresh()
        assert list(catalogue.models()) == [model("a")]


async def test_a_server_that_says_nothing_does_not_keep_us_from_starting(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.backends.upstream_backend.START_SECONDS", 0.05)
    async with connect(Reply(raw=STALL)) as line, catalogue_of(line) as catalogue:
        assert list(catalogue.models()) == []
        await line.server.until_requests(1)


def test_it_can_be_asked_before_it_runs(connect: Any) -> None:
    async def make() -> ModelCatalog:
        async with connect() as line:
            return ModelCatalog(line.upstream, owned_by="there")

    assert list(asyncio.run(make()).models()) == []
