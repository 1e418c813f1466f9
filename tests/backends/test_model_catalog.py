"""The list of the models that an upstream serves."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from antiphon.backends.base import Model
from antiphon.backends.model_catalog import ModelCatalog
from support.upstream_client import connect
from support.upstream_server import STALL, Reply, json_of


@asynccontextmanager
async def open_catalog(conn: Any) -> AsyncIterator[ModelCatalog]:
    catalog = ModelCatalog(conn.upstream, owned_by="there", now=conn.now)
    await catalog.start()
    try:
        yield catalog
    finally:
        await catalog.close()


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
async def test_model_list_formats_are_parsed(listed: Any, models: list[Model]) -> None:
    async with connect(json_of(listed)) as conn, open_catalog(conn) as catalog:
        assert list(catalog.models()) == models
        assert conn.server.requests[0].path == "/v1/models"


async def test_configured_window_overrides_listed_one() -> None:
    async with (
        connect(json_of({"data": [{"id": "a", "max_model_len": 8}]}), context_window=4) as conn,
        open_catalog(conn) as catalog,
    ):
        assert list(catalog.models()) == [model("a", context_window=4)]


async def test_configured_models_are_not_requested() -> None:
    async with connect(models=["b", "a", "b"]) as conn, open_catalog(conn) as catalog:
        conn.time += 1000
        assert list(catalog.models()) == [model("b"), model("a")]
        assert conn.server.requests == []


async def test_old_model_list_is_refreshed_in_background() -> None:
    async with (
        connect(json_of([{"id": "old"}]), json_of([{"id": "new"}])) as conn,
        open_catalog(conn) as catalog,
    ):
        conn.time += 59
        assert [each.id for each in catalog.models()] == ["old"]
        conn.time += 1
        assert [each.id for each in catalog.models()] == ["old"]
        await until_refreshed()
        assert [each.id for each in catalog.models()] == ["new"]
        assert len(conn.server.requests) == 2


async def test_start_succeeds_while_upstream_is_down(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="antiphon"):
        async with (
            connect(Reply(status=500), json_of([{"id": "a"}])) as conn,
            open_catalog(conn) as catalog,
        ):
            assert list(catalog.models()) == []
            conn.time += 60
            assert list(catalog.models()) == []
            await until_refreshed()
            assert list(catalog.models()) == [model("a")]
    assert caplog.messages == ["backend there: cannot list models: The upstream failed (status 500)."]


async def test_failed_refresh_keeps_the_model_list() -> None:
    async with (
        connect(json_of([{"id": "a"}]), Reply(status=500), json_of([{"id": "b"}])) as conn,
        open_catalog(conn) as catalog,
    ):
        conn.time += 60
        await catalog.refresh()
        assert list(catalog.models()) == [model("a")]


async def test_start_succeeds_while_upstream_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.backends.model_catalog.START_SECONDS", 0.05)
    async with connect(Reply(raw=STALL)) as conn, open_catalog(conn) as catalog:
        assert list(catalog.models()) == []
        await conn.server.until_requests(1)


def test_model_list_is_readable_before_start() -> None:
    async def make() -> ModelCatalog:
        async with connect() as conn:
            return ModelCatalog(conn.upstream, owned_by="there")

    assert list(asyncio.run(make()).models()) == []
