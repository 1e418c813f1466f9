import asyncio

import pytest

from antiphon.config import load
from antiphon.engine.assemble import build_engine, make_policy
from antiphon.engine.policy import Policy
from antiphon.errors import ConfigError


def settings(tmp_path, **overrides):
    backends = {
        "first": {"kind": "scripted", "script": {"models": ["a", "b"]}},
        "second": {"kind": "scripted", "script": {"models": ["b", "c"]}},
    }
    return load(None, {"HOME": str(tmp_path)}, {"store": "memory:", "backends": backends, **overrides})


async def test_the_engine_serves_the_models_of_all_backends(tmp_path):
    engine = build_engine(settings(tmp_path))
    await engine.start()
    try:
        assert [model.id for model in engine.models()] == ["a", "b", "c"]
    finally:
        await engine.close()


def test_the_store_of_the_settings_is_opened(tmp_path):
    async def start_and_close() -> None:
        engine = build_engine(settings(tmp_path, store=f"sqlite:///{tmp_path}/responses.db"))
        await engine.start()
        await engine.close()

    asyncio.run(start_and_close())
    assert (tmp_path / "responses.db").exists()


@pytest.mark.parametrize(
    "wrong", [{"store": "papyrus:"}, {"backends": {"x": {"kind": "oracle"}}}], ids=["store", "backend"]
)
def test_what_cannot_be_made_is_a_configuration_error(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"papyrus|oracle"):
        build_engine(settings(tmp_path, **wrong))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, Policy(retention_seconds=30 * 86400)),
        (
            {"inherit_tools": False, "background_slots": 3, "background_lease_seconds": 2},
            Policy(inherit_tools=False, background_slots=3, background_lease_seconds=2, retention_seconds=30 * 86400),
        ),
        ({"retention_days": 0.5}, Policy(retention_seconds=43200)),
        ({"retention_days": 0.000001}, Policy(retention_seconds=1)),
        ({"retention_days": 0}, Policy(retention_seconds=None)),
        (
            {"retention_days": 0, "stateless": True, "stateless_id_prefix": "AM-"},
            Policy(stateless=True, id_prefix="AM-"),
        ),
        ({"retention_days": 0, "stateless_id_prefix": "AM-"}, Policy()),
    ],
)
def test_the_settings_become_a_policy(tmp_path, given, policy):
    assert make_policy(settings(tmp_path, **given)) == policy


async def test_a_stateless_engine_leaves_the_store_alone(tmp_path):
    engine = build_engine(settings(tmp_path, store=f"sqlite:///{tmp_path}/responses.db", stateless=True))
    await engine.start()
    await engine.close()
    assert not (tmp_path / "responses.db").exists()
