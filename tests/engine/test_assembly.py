import asyncio

import pytest

from antiphon.config.loading import load
from antiphon.engine.assembly import build_engine, make_configuration_id, make_policy
from antiphon.engine.policy import Policy
from antiphon.engine.sealing import Sealer
from antiphon.errors import ConfigError
from antiphon.protocol import codec
from antiphon.store.limits import RunLimits
from antiphon.turn_queue import QueueLimits
from support.upstream_server import STALL, json_of, serve, stream_of


def settings(tmp_path, **overrides):
    backends = {
        "first": {"kind": "scripted", "script": {"models": ["a", "b"]}},
        "second": {"kind": "scripted", "script": {"models": ["b", "c"]}},
    }
    return load(None, {"HOME": str(tmp_path)}, {"store": "memory:", "backends": backends, **overrides})


async def test_engine_serves_models_of_all_backends(tmp_path):
    engine = build_engine(settings(tmp_path))
    await engine.start()
    try:
        assert [model.id for model in engine.models()] == ["a", "b", "c"]
    finally:
        await engine.close()


def test_store_of_settings_is_opened(tmp_path):
    async def start_and_close() -> None:
        engine = build_engine(settings(tmp_path, store=f"sqlite:///{tmp_path}/responses.db"))
        await engine.start()
        await engine.close()

    asyncio.run(start_and_close())
    assert (tmp_path / "responses.db").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"store": "papyrus:"}, {"backends": {"x": {"kind": "oracle"}}}],
    ids=["store", "backend"],
)
def test_invalid_settings_raise_config_error(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"papyrus|oracle"):
        build_engine(settings(tmp_path, **wrong))


LIMITS = RunLimits(queued=10_000, queued_per_project=2_000)


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
        (
            {"retention_days": 0, "background_concurrency": 3, "background_concurrency_per_project": 2},
            Policy(background_limits=LIMITS._replace(concurrency=3, concurrency_per_project=2)),
        ),
        (
            {"retention_days": 0, "background_starts_per_minute": 60},
            Policy(background_limits=LIMITS._replace(starts_per_minute=60)),
        ),
        ({"retention_days": 0, "dbos": False}, Policy()),
        (
            {"retention_days": 0, "dbos": {"database": "postgresql://db/dbos", "concurrency": 2}},
            Policy(background_limits=LIMITS._replace(concurrency=2)),
        ),
        (
            {"retention_days": 0, "queued": 7, "queued_per_project": 0, "queue_seconds": 2.5},
            Policy(queue=QueueLimits(7, 0, 2.5)),
        ),
        (
            {"retention_days": 0, "background_queued": 9, "background_queued_per_project": 8},
            Policy(background_limits=RunLimits(queued=9, queued_per_project=8)),
        ),
    ],
)
def test_settings_become_policy(tmp_path, given, policy):
    assert make_policy(settings(tmp_path, **given)) == policy


def test_warnings_of_settings_are_logged_at_start(tmp_path, caplog):
    build_engine(settings(tmp_path, dbos=False))
    assert caplog.messages == ["--dbos: deprecated and without effect. Remove it."]


async def test_stateless_engine_does_not_touch_store(tmp_path):
    engine = build_engine(settings(tmp_path, store=f"sqlite:///{tmp_path}/responses.db", stateless=True))
    await engine.start()
    await engine.close()
    assert not (tmp_path / "responses.db").exists()


def test_configuration_id_differs_by_configuration_and_reveals_nothing(tmp_path):
    sealer = Sealer([bytes(32)])

    def home(**overrides):
        return make_configuration_id(settings(tmp_path, **overrides), sealer)

    one = {"kind": "chat_completions", "base_url": "http://127.0.0.1:1/v1", "api_key": "sk-1"}
    differing = [
        {},
        {"data_dir": str(tmp_path / "data")},
        {"models": {"fast": "first/a"}},
        {"models": {"fast": "first/b"}},
        {"backends": {"up": one}},
        {"backends": {"another": one}},
        {"backends": {"up": one | {"kind": "responses"}}},
        {"backends": {"up": one | {"base_url": "http://127.0.0.1:2/v1"}}},
        {"backends": {"up": one, "more": one}},
        {"backends": {"more": one, "up": one}},
    ]
    homes = [home(**each) for each in differing]
    assert len(set(homes)) == len(differing)
    assert homes == [home(**each, port=1, background_slots=1, log_level="debug") for each in differing]
    assert make_configuration_id(settings(tmp_path), Sealer([b"1" * 32])) != homes[0]  # another key


async def test_restarted_server_continues_run_of_unlisted_model_at_once(tmp_path):
    produced = b'data: {"choices":[{"delta":{"content":"at once"}}]}\n\n'
    ended = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    request = codec.decode_request(b'{"model":"any-name","input":"hi","background":true}').body
    async with serve([stream_of(STALL), stream_of(produced, ended)], fixed={"/v1/models": json_of({"data": []})}) as up:
        configured = settings(
            tmp_path,
            store=f"sqlite:///{tmp_path}/responses.db",
            backends={"up": {"kind": "chat_completions", "base_url": up.url}},
            background_lease_seconds=3600,
        )
        first = build_engine(configured)
        await first.start()
        queued = (await first.create(request, project="p")).response
        await up.until_requests(2)  # one of them is the request for the model list
        await first.close()
        again = build_engine(configured)
        await again.start()
        try:
            events = [event async for batch in await again.follow("p", queued.id, after=-1) for event in batch]
            assert events[-1].type == "response.completed"
            assert (await again.retrieve("p", queued.id)).output_text == "at once"
        finally:
            await again.close()
