"""New settings for a running server: keys, backends, models and limits change, and no stream is dropped."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import APIError, AuthenticationError, NotFoundError

from antiphon.config.changes import SettingChanges
from antiphon.config.limits import UsageLimits
from antiphon.config.settings import ApiKey, BackendSettings, Settings
from antiphon.errors import AntiphonError, ConfigError
from antiphon.server.reload import Reloader, hold_signal
from antiphon.server.running_servers import ServerFile
from antiphon.store.keys import generate_key
from support.live_server import TIMEOUT, LiveServer, make_settings

GATED = {"rules": [{"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]}]}
Serve = Callable[..., LiveServer]


def make_backend(text: str, **options: Any) -> BackendSettings:
    return BackendSettings(kind="scripted", options={"script": {"default": text, **options}})


def change(running: LiveServer, **changes: Any) -> SettingChanges:
    settings: Settings = msgspec.structs.replace(running.server.settings, **changes)
    found: SettingChanges = running.wait_for(lambda: running.server.apply_settings(settings))
    return found


def ask(running: LiveServer, text: str = "hi", key: str = "any", model: str = "scripted") -> str:
    with running.client(key) as client:
        return client.responses.create(model=model, input=text).output_text


def test_stream_ends_on_the_backend_that_a_reload_has_replaced(serve: Serve) -> None:
    running = serve(GATED)
    closed: list[str] = []
    old = running.backend
    close = old.close

    async def record_close() -> None:
        closed.append("old")
        await close()

    old.close = record_close  # type: ignore[method-assign]
    with running.client() as client, client.responses.stream(model="scripted", input="wait") as stream:
        deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
        assert next(deltas) == "first"
        changes = change(running, backends={"scripted": make_backend("new")})
        assert (changes.changed, changes.ignored) == (["backends"], [])
        assert ask(running) == "new"
        assert closed == []
        running.do(lambda: old.release("gate"))
        assert "".join(deltas) == " last"
    running.stop()
    assert closed == ["old"]


def test_stream_of_a_model_that_a_reload_removes_ends_normally(serve: Serve) -> None:
    running = serve(GATED, models={"alias": ("scripted",)}, api_keys=(ApiKey("sk-old"),))
    with running.client("sk-old") as client, client.responses.stream(model="alias", input="wait") as stream:
        deltas = (event.delta for event in stream if event.type == "response.output_text.delta")
        assert next(deltas) == "first"
        change(running, backends={"scripted": make_backend("new")}, models={}, api_keys=(ApiKey("sk-new"),))
        with pytest.raises(AuthenticationError), running.client("sk-old") as refused:
            refused.responses.create(model="scripted", input="hi")
        with pytest.raises(NotFoundError, match="The model 'alias' does not exist"):
            ask(running, key="sk-new", model="alias")
        running.do(lambda: running.backend.release("gate"))
        assert "".join(deltas) == " last"
        final = stream.get_final_response()
    with running.client("sk-new") as client:
        assert client.responses.retrieve(final.id).output_text == "first last"


def test_queued_run_of_a_model_that_a_reload_removes_fails(serve: Serve) -> None:
    settings = {"background_slots": 1, "background_lease_seconds": 0.1}
    running = serve(GATED, models={"alias": ("scripted",)}, **settings)
    with running.client() as client:
        first = client.responses.create(model="alias", input="wait", background=True)
        running.wait_for(lambda: running.backend.reached("gate"))
        second = client.responses.create(model="alias", input="wait", background=True)
        change(running, backends={"scripted": make_backend("new")}, models={})
        running.do(lambda: running.backend.release("gate"))
        *_, last = client.responses.retrieve(first.id, stream=True)
        assert last.type == "response.completed"
        with pytest.raises(APIError, match="The model 'alias' does not exist"):
            list(client.responses.retrieve(second.id, stream=True))
        failed = client.responses.retrieve(second.id)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "model_not_found")


def test_request_before_a_reload_stays_on_its_backend(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = serve({"default": "old"}, limits=UsageLimits(stored_bytes=10**9))
    store = running.engine.admin_store
    measuring, gate = threading.Event(), threading.Event()
    measure = store.measure_stored_bytes

    async def wait_and_measure(project: str) -> int:
        measuring.set()
        await asyncio.to_thread(gate.wait)
        return await measure(project)

    monkeypatch.setattr(store, "measure_stored_bytes", wait_and_measure)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, running)
        assert measuring.wait(TIMEOUT)
        change(running, backends={"scripted": make_backend("new")})
        gate.set()
        assert waiting.result(TIMEOUT) == "old"
    assert ask(running) == "new"


async def test_signal_during_the_start_reloads_after_it(tmp_path: Path) -> None:
    earlier = signal.getsignal(signal.SIGHUP)
    reloaded = asyncio.Event()
    settings = make_settings()

    async def apply(new: Settings) -> SettingChanges:
        reloaded.set()
        return SettingChanges(new, [], [])

    file = ServerFile.create(tmp_path / "servers", "http://127.0.0.1:1")
    try:
        with hold_signal():
            signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
            reloader = Reloader(lambda: settings, apply, file=file, on_hangup=reloaded.set)
            reloader.start()
            async with asyncio.timeout(TIMEOUT):
                await reloaded.wait()
            reloader.close()
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_signal_during_a_failed_start_does_not_hide_the_error() -> None:
    with pytest.raises(ConfigError), hold_signal():
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
        raise ConfigError("the settings are wrong")
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_background_run_ends_on_the_replaced_backend(serve: Serve) -> None:
    running = serve(GATED)
    with running.client() as client:
        queued = client.responses.create(model="scripted", input="wait", background=True)
        running.wait_for(lambda: running.backend.reached("gate"))
        change(running, backends={"scripted": make_backend("new")})
        running.do(lambda: running.backend.release("gate"))
        *_, last = client.responses.retrieve(queued.id, stream=True)
        assert last.response.output_text == "first last"  # type: ignore[union-attr]
        again = client.responses.create(model="scripted", input="wait", background=True)
        *_, last = client.responses.retrieve(again.id, stream=True)
        assert last.response.output_text == "new"  # type: ignore[union-attr]


def test_backend_with_the_same_settings_stays_open(serve: Serve) -> None:
    chat = BackendSettings(kind="chat_completions", options={"base_url": "http://127.0.0.1:9/v1", "models": ["small"]})
    running = serve({}, backends={"scripted": make_backend("old")})
    change(running, backends={"scripted": make_backend("old"), "chat": chat})
    chat_backend = running.engine.backends["chat"]
    change(running, backends={"scripted": make_backend("new"), "chat": chat}, models={"alias": ("chat/small",)})
    assert running.engine.backends["chat"] is chat_backend
    assert [model["id"] for model in running.ask("GET", "/v1/models").json["data"]] == ["scripted", "small", "alias"]


def test_removed_key_is_refused_on_an_open_connection(serve: Serve) -> None:
    running = serve({"default": "hi"}, api_keys=(ApiKey("old"),), backends={"scripted": make_backend("hi")})
    with running.client("old") as client:
        assert client.models.list().data
        assert change(running, api_keys=(ApiKey("new", "p"),)).changed == ["api_keys"]
        with pytest.raises(Exception, match="Incorrect API key provided"):
            client.models.list()
    assert ask(running, key="new") == "hi"


def test_key_is_required_once_the_settings_have_one(serve: Serve) -> None:
    running = serve({"default": "hi"}, backends={"scripted": make_backend("hi")})
    assert running.ask("GET", "/v1/models").status == 200
    change(running, api_keys=(ApiKey("new"),))
    assert running.ask("GET", "/v1/models").status == 401
    change(running, api_keys=())
    assert running.ask("GET", "/v1/models").status == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": {"scripted": BackendSettings(kind="papyrus")}}, "no backend of kind 'papyrus' is installed"),
        ({"models": {"alias": ("nowhere/x",)}}, "models.alias: there is no backend 'nowhere'"),
        (
            {
                "backends": {
                    "scripted": make_backend("new"),
                    "embedded": BackendSettings("embedded", {"weights": "nowhere.gguf"}),
                }
            },
            "nowhere.gguf",
        ),
    ],
)
def test_unusable_settings_change_nothing(serve: Serve, changes: dict[str, Any], message: str) -> None:
    running = serve({"default": "old"}, api_keys=(ApiKey("old"),), backends={"scripted": make_backend("old")})
    before = running.server.settings
    with pytest.raises(AntiphonError, match=message):
        change(running, api_keys=(ApiKey("new"),), **changes)
    assert running.server.settings is before
    assert ask(running, key="old") == "old"


def test_reload_that_removes_the_last_key_logs_a_warning(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "antiphon.server.process")
    running = serve({"default": "hi"}, api_keys=(ApiKey("old"),), backends={"scripted": make_backend("hi")})
    for keys in [(ApiKey("new"),), (), ()]:
        change(running, api_keys=keys)
    assert [record.message for record in caplog.records if record.name == "antiphon.server.process"] == [
        "api_keys: the server has no key any more: anyone who can reach 127.0.0.1 can use it"
    ]


def test_reload_without_keys_on_a_public_address_is_refused(serve: Serve) -> None:
    backends = {"scripted": make_backend("hi")}
    running = serve({"default": "hi"}, host="0.0.0.0", api_keys=(ApiKey("old"),), backends=backends)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is reachable from other machines"):
        change(running, api_keys=())
    assert running.ask("GET", "/v1/models").status == 401


def test_reload_finds_a_key_that_was_stored_since_the_start(serve: Serve) -> None:
    backends = {"scripted": make_backend("hi")}
    running = serve({"default": "hi"}, host="0.0.0.0", api_keys=(ApiKey("old"),), backends=backends)
    key, value = generate_key("p", "", ["inference"], created_at=1)
    running.wait_for(lambda: running.engine.key_store.save_key(key))
    assert change(running, api_keys=()).changed == ["api_keys"]
    headers = {"Authorization": f"Bearer {value}"}
    assert running.ask("GET", "/v1/models").status == 401
    assert running.ask("GET", "/v1/models", headers=headers).status == 200


def test_settings_that_need_a_restart_are_named_and_stay(serve: Serve) -> None:
    running = serve({"default": "hi"}, backends={"scripted": make_backend("hi")})
    changes = change(running, port=1, store="sqlite:///other.db", workers=2, queued=7, run_currency="EUR")
    assert (changes.changed, changes.ignored) == (["queued"], ["port", "workers", "store"])
    assert (running.server.settings.port, running.server.settings.queued) == (0, 7)
