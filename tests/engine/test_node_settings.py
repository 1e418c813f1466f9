"""Nodes on one database: differences between their settings, versions and clocks are logged."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.settings import ApiKey, Settings
from antiphon.engine.assembly import build_engine, make_sealer, reconfigure
from antiphon.engine.engine import Engine
from antiphon.engine.node_settings import NodeDescription, compare_nodes, make_setting_digests

TIMEOUT = 60
SECRETS = [base64.b64encode(bytes([number]) * 32).decode() for number in range(2)]
StartNode = Callable[..., Any]


def make_node_settings(store: str, **changes: Any) -> Settings:
    return Settings(
        **{"store": store, "data_dir": Path("unused"), "seal_keys": (SECRETS[0],), "backends": {}} | changes
    )


@pytest.fixture
async def start_node(postgres_url: str) -> AsyncIterator[StartNode]:
    async with AsyncExitStack() as stack, asyncio.timeout(TIMEOUT):

        async def start(**changes: Any) -> Engine:
            """Start an engine without models, and wait until it has compared its settings."""
            engine = build_engine(make_node_settings(postgres_url, **changes))
            await engine.start()
            stack.push_async_callback(engine.close)
            assert engine.node_settings._task is not None
            await engine.node_settings._task
            return engine

        yield start


async def test_different_settings_of_nodes_are_logged_by_name(
    start_node: StartNode, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "antiphon.engine.node_settings")
    first = await start_node()
    await start_node()
    assert caplog.messages == []
    await start_node(api_keys=(ApiKey("sk-secret", "a"),), retention_days=1.0)
    texts = [message.partition(")")[2] for message in caplog.messages]
    assert texts == [" has other settings: api_keys, retention_days"] * 2
    assert "sk-secret" not in caplog.text
    caplog.clear()
    old, new = (make_node_settings(postgres_url, retention_days=days) for days in (30.0, 2.0))
    await reconfigure(first, old, new)
    await start_node(retention_days=2.0)
    texts = sorted(message.partition(")")[2] for message in caplog.messages)
    assert texts == [" has other settings: api_keys, retention_days", " has other settings: retention_days"]


async def test_other_seal_key_of_a_node_is_logged(start_node: StartNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "antiphon.engine.node_settings")
    await start_node()
    await start_node(seal_keys=(SECRETS[1],), retention_days=1.0)
    texts = [message.partition(")")[2] for message in caplog.messages]
    assert texts == [" has another newest key in seal_keys: set the same on all nodes"]


def test_clocks_and_versions_are_compared() -> None:
    settings = make_node_settings("memory:")
    digests = make_setting_digests(settings, make_sealer(settings))
    own = NodeDescription("a (process 1)", "1.0", 1000.0, digests)
    others = [
        NodeDescription("b (process 2)", "1.0", 1008.0, digests),  # the answer took three seconds
        NodeDescription("c (process 3)", "1.1", 1009.0, digests),
        NodeDescription("d (process 4)", "1.0", 994.0, digests),
    ]
    assert list(compare_nodes(own, others, seconds=3.0)) == [
        "the node c (process 3) has version 1.1, and this one 1.0",
        "the clock of the node c (process 3) differs by +9 seconds",
        "the clock of the node d (process 4) differs by -6 seconds",
    ]
