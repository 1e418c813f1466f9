"""Limits on a running server: HTTP, streams, WebSockets, background responses, agents and several processes."""

import asyncio
import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import RateLimitError

from antiphon.config.limits import ModelPrice, ProjectSettings, UsageLimits
from antiphon.config.settings import ApiKey
from antiphon.engine.usage import Charge, UsageRecorder
from antiphon.errors import RateLimited, StoreUnavailable
from antiphon.protocol.response import Usage
from antiphon.server.limits.limiter import Limiter
from antiphon.server.limits.sync import LimitSync
from antiphon.store.base import Store
from antiphon.store.location import locate_store
from support.live_server import TIMEOUT, HttpResponse, LiveServer, make_settings
from support.prometheus import parse_metrics
from support.websocket_client import WebSocketClient

KEYS = (ApiKey("sk-ada", "a"), ApiKey("sk-bob", "b"))
SCRIPT = {
    "models": ["scripted"],
    "rules": [
        {"user": "wait", "answers": [[{"text": "first "}, {"wait": "gate"}, {"text": "last"}]]},
        {"user": "crash", "answers": [[{"crash": "broken"}]]},
        {"user": "fail", "answers": [[{"failure": {"message": "No.", "code": "model_error"}}]]},
    ],
}
Serve = Callable[..., LiveServer]


def ask(running: LiveServer, text: Any = "hi", *, key: str = "sk-ada", **fields: Any) -> HttpResponse:
    body = {"model": "scripted", "input": text, **fields}
    return running.ask("POST", "/v1/responses", body, headers={"Authorization": f"Bearer {key}"})


def read_limits(answer: HttpResponse) -> dict[str, str]:
    return {name: text for name, text in answer.headers.items() if name.startswith("x-ratelimit")}


def wait_until(is_reached: Callable[[], bool]) -> None:
    """Wait for a state that the server is about to reach."""
    deadline = time.monotonic() + TIMEOUT
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_client_gets_an_error_and_headers_at_the_limit(serve: Serve) -> None:
    running = serve({}, api_keys=KEYS, limits=UsageLimits(requests_per_minute=2, tokens_per_minute=500))
    client = running.client("sk-ada")
    raw = client.responses.with_raw_response.create(model="scripted", input="hi")
    assert (raw.headers["x-ratelimit-limit-requests"], raw.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    stream = client.responses.create(model="scripted", input="hi", stream=True)
    headers = stream.response.headers
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("0", "496")
    list(stream)
    with pytest.raises(RateLimitError) as refused:
        client.responses.create(model="scripted", input="hi")
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 50 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert ask(running, key="sk-bob").status == 200


def test_reading_does_not_count_but_shows_the_limits(serve: Serve) -> None:
    running = serve({}, limits=UsageLimits(requests_per_minute=1))
    response_id = ask(running).json["id"]
    answers = [running.ask("GET", path) for path in ("/v1/models", f"/v1/responses/{response_id}")]
    assert [answer.status for answer in answers] == [200, 200]
    assert [read_limits(answer)["x-ratelimit-remaining-requests"] for answer in answers] == ["0", "0"]
    assert read_limits(running.ask("GET", "/healthz")) == {}
    assert ask(running).status == 429


def test_server_without_limits_sends_no_limit_headers(server: LiveServer) -> None:
    assert read_limits(ask(server)) == {}


@pytest.mark.parametrize("path", ["input_tokens", "compact"])
def test_other_uses_of_a_model_count_as_requests(serve: Serve, path: str) -> None:
    running = serve({}, limits=UsageLimits(requests_per_minute=1))
    body = {"model": "scripted", "input": "hi"}
    statuses = [running.ask("POST", f"/v1/responses/{path}", body).status for _ in range(2)]
    assert statuses == [200, 429]


def test_turn_of_an_agent_counts_once_and_with_all_its_tokens(serve: Serve) -> None:
    running = serve({}, api_keys=KEYS, limits=UsageLimits(requests_per_minute=2, tokens_per_minute=4))
    body = {"Mode": "ask", "Instruction": "hi"}
    headers = {"Authorization": "Bearer sk-ada"}
    answers = [running.ask("POST", "/v1/agent/execute", body, headers=headers) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 429]
    assert "tokens_per_minute" in answers[1].json["error"]["message"]


@pytest.fixture
def single(serve: Serve) -> LiveServer:
    """A server that allows one response at a time."""
    return serve(SCRIPT, api_keys=KEYS, limits=UsageLimits(concurrent=1))


def open_stream(running: LiveServer, **fields: Any) -> http.client.HTTPConnection:
    """Start a streamed response that waits, and return its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    body = json.dumps({"model": "scripted", "input": "wait", "stream": True, **fields})
    connection.request("POST", "/v1/responses", body, {"Authorization": "Bearer sk-ada"})
    assert connection.getresponse().status == 200
    running.wait_for(lambda: running.backend.reached("gate"))
    return connection


def test_second_concurrent_response_is_refused(single: LiveServer) -> None:
    connection = open_stream(single)
    refused = ask(single)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert "`limits.concurrent`" in refused.json["error"]["message"]
    assert ask(single, key="sk-bob").status == 200
    single.do(lambda: single.backend.release("gate"))
    wait_until(lambda: ask(single).status == 200)
    connection.close()


def test_ignored_background_parameter_does_not_evade_the_limit(serve: Serve) -> None:
    running = serve(SCRIPT, api_keys=KEYS, limits=UsageLimits(concurrent=1), stateless=True)
    connection = open_stream(running, background=True)
    assert ask(running).status == 429
    running.do(lambda: running.backend.release("gate"))
    wait_until(lambda: ask(running).status == 200)
    connection.close()


@pytest.mark.parametrize(
    "fields",
    [{"input": "crash"}, {"input": "fail"}, {"input": []}, {"temperature": 9}, {"model": "unknown"}, {"stream": "x"}],
    ids=["crash", "failure", "no-input", "bad-value", "no-model", "bad-type"],
)
def test_failed_request_releases_its_permit(single: LiveServer, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        body = {"model": "scripted", "input": "hi", "stream": stream, **fields}
        single.ask("POST", "/v1/responses", body, headers={"Authorization": "Bearer sk-ada"})
    assert ask(single).status == 200


def test_disconnected_stream_releases_its_permit_and_is_charged(serve: Serve) -> None:
    running = serve(SCRIPT, api_keys=KEYS, limits=UsageLimits(concurrent=1, tokens_per_minute=5))
    open_stream(running).close()
    wait_until(lambda: "concurrent" not in ask(running).json.get("error", {"message": ""})["message"])
    wait_until(lambda: "tokens_per_minute" in ask(running).json.get("error", {"message": ""})["message"])


def test_cancelled_response_releases_its_permit(single: LiveServer) -> None:
    connection = open_stream(single)
    response_id = next(key.response_id for key in single.engine._foreground._runs)
    single.ask("POST", f"/v1/responses/{response_id}/cancel", headers={"Authorization": "Bearer sk-ada"})
    wait_until(lambda: ask(single).status == 200)
    connection.close()


def test_background_response_holds_no_permit_and_charges_its_key(serve: Serve) -> None:
    running = serve(SCRIPT, api_keys=KEYS, limits=UsageLimits(concurrent=1, tokens_per_minute=8))
    assert ask(running, "wait", background=True).json["status"] in ("queued", "in_progress")
    running.wait_for(lambda: running.backend.reached("gate"))
    assert ask(running).status == 200
    running.do(lambda: running.backend.release("gate"))
    wait_until(lambda: ask(running).status == 429)
    assert ask(running, key="sk-bob").status == 200


def test_each_websocket_request_counts(serve: Serve) -> None:
    running = serve(SCRIPT, api_keys=KEYS, limits=UsageLimits(requests_per_minute=3, concurrent=1))
    with WebSocketClient(running, key="sk-ada") as client:
        kinds = []
        for _ in range(4):
            client.create()
            while (event := client.next())["type"] not in ("response.completed", "error"):
                pass
            kinds.append(event["type"])
        assert kinds == ["response.completed"] * 3 + ["error"]
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
    assert ask(running).status == 429


def test_closed_websocket_releases_its_permits(single: LiveServer) -> None:
    with WebSocketClient(single, key="sk-ada") as client:
        client.create("wait", stream_id="one")
        single.wait_for(lambda: single.backend.reached("gate"))
        client.create("hi", stream_id="two")
        assert client.next("two")["error"]["code"] == "rate_limit_exceeded"
    wait_until(lambda: ask(single).status == 200)


def test_waiting_background_responses_of_a_project_are_limited(serve: Serve) -> None:
    running = serve(
        SCRIPT,
        api_keys=KEYS,
        metrics=True,
        limits=UsageLimits(background=1, queued=2),
        projects={"b": ProjectSettings(limits=UsageLimits(queued=0, background=2))},
    )
    assert ask(running, "wait", background=True).status == 200
    running.wait_for(lambda: running.backend.reached("gate"))
    statuses = [ask(running, "wait", background=True).status for _ in range(2)]
    refused = ask(running, background=True)
    assert (*statuses, refused.status, refused.json["error"]["code"]) == (200, 200, 429, "rate_limit_exceeded")
    assert "`limits.queued`" in refused.json["error"]["message"]
    assert "`projects.b.limits.queued`" in ask(running, key="sk-bob", background=True).json["error"]["message"]
    assert running.engine.background_count == 1
    metrics = running.ask("GET", "/metrics", headers={"Authorization": "Bearer sk-ada"}).body.decode()
    samples = parse_metrics(metrics)["antiphon_limited_requests_total"].samples
    assert [(labels, value) for _, labels, value in samples] == [({"limit": "queued"}, 2)]
    running.do(lambda: running.backend.release("gate"))


def test_stored_bytes_refuse_only_requests_that_store(serve: Serve) -> None:
    running = serve({}, limits=UsageLimits(stored_bytes=100))
    first = ask(running).json["id"]
    # The size is measured again when the last measurement is old.
    running.engine._quota._measurements.clear()
    refused = ask(running)
    assert (refused.status, refused.json["error"]["type"]) == (429, "insufficient_quota")
    assert "`limits.stored_bytes` is 100" in refused.json["error"]["message"]
    assert running.ask("POST", "/v1/conversations", {"items": []}).status == 429
    assert ask(running, store=False).status == 200
    assert running.ask("DELETE", f"/v1/responses/{first}").status == 200
    running.engine._quota._measurements.clear()
    assert ask(running).status == 200


def test_stored_bytes_refuse_requests_that_add_items_to_a_conversation(serve: Serve) -> None:
    running = serve({}, limits=UsageLimits(stored_bytes=100))
    conversation = running.ask("POST", "/v1/conversations", {}).json["id"]
    assert ask(running, "a" * 100, conversation=conversation, store=False).status == 200
    # The size is measured again when the last measurement is old.
    running.engine._quota._measurements.clear()
    refused = ask(running, conversation=conversation, store=False)
    assert (refused.status, refused.json["error"]["type"]) == (429, "insufficient_quota")
    assert (
        running.ask("GET", f"/v1/conversations/{conversation}/items").json["data"][-1]["content"][0]["text"]
        == "a" * 100
    )
    assert ask(running, store=False).status == 200


def test_budget_of_a_project_survives_a_restart(serve: Serve, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    options = {
        "api_keys": KEYS,
        "prices": {"scripted": ModelPrice(input=1e6, output=1e6)},
        "projects": {"a": ProjectSettings(limits=UsageLimits(cost_per_month=4))},
    }
    running = serve({}, store=locate_store(url), **options)
    assert ask(running).status == 200
    running.stop()
    running = serve({}, store=locate_store(url), **options)
    refused = ask(running)
    assert (refused.status, refused.json["error"]["type"]) == (429, "insufficient_quota")
    assert "4.00 USD of 4 this month (`projects.a.limits.cost_per_month`)" in refused.json["error"]["message"]
    assert ask(running, key="sk-bob").status == 200


# Several processes


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    return f"sqlite:///{tmp_path}/store.db"


class Node:
    """The limiter of one process, with a store of its own on the shared database."""

    def __init__(self, store: Store, limits: UsageLimits) -> None:
        self.limiter = Limiter(make_settings(limits=limits))
        self.recorder = UsageRecorder(store, {})
        self.recorder.on_charge = self.limiter.charge
        self.sync = LimitSync(self.limiter, store, self.recorder)

    def is_admitted(self) -> bool:
        try:
            self.limiter.admit("p", "key_1")
        except RateLimited:
            return False
        return True


@pytest.fixture
async def stores(store_url: str) -> Any:
    stores = [locate_store(store_url), locate_store(store_url)]
    for store in stores:
        await store.open()
    yield stores
    for store in stores:
        await store.close()


async def test_limits_hold_over_two_processes(stores: list[Store]) -> None:
    first, second = (Node(store, UsageLimits(requests_per_minute=4, concurrent=3)) for store in stores)
    assert [first.is_admitted(), first.is_admitted(), second.is_admitted()] == [True] * 3
    for node in (first, second, first):
        await node.sync.exchange()
    assert [first.is_admitted(), second.is_admitted()] == [False, False]
    assert first.limiter.refusals == {"concurrent": 1}


async def test_process_without_requests_has_the_counts_of_others(stores: list[Store]) -> None:
    first, second = (Node(store, UsageLimits(requests_per_minute=2)) for store in stores)
    assert [first.is_admitted(), first.is_admitted()] == [True, True]
    for node in (first, second):
        await node.sync.exchange()
    assert second.is_admitted() is False


async def test_counts_of_others_fade_while_the_store_fails(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Node(store, UsageLimits(requests_per_minute=2, concurrent=2)) for store in stores)
    assert [first.is_admitted(), first.is_admitted()] == [True, True]
    for node in (first, second):
        await node.sync.exchange()

    async def fail(node: str) -> Any:
        raise StoreUnavailable("The store cannot be reached.")

    monkeypatch.setattr(stores[1], "list_limit_counts", fail)
    admitted = []
    for seconds in (1, 30, 61):
        monkeypatch.setattr(second.sync, "_monotonic", lambda seconds=seconds: time.monotonic() + seconds)
        await second.sync.exchange()
        admitted.append(second.is_admitted())
    assert (admitted, second.limiter.refusals) == ([False, True, True], {"concurrent": 1})


async def test_budget_holds_over_two_processes(stores: list[Store]) -> None:
    first, second = (Node(store, UsageLimits(tokens_per_month=100)) for store in stores)
    for node, tokens in ((first, 60), (second, 39)):
        assert node.is_admitted()
        node.limiter.charge(Charge("p", "key_1", 0, 0.0))
        node.recorder.record("p", "key_1", "m", make_usage(tokens))
    await asyncio.gather(first.sync.read_budgets(), second.sync.read_budgets())
    await first.sync.read_budgets()
    assert first.is_admitted()
    first.recorder.record("p", "key_1", "m", make_usage(1))
    assert not first.is_admitted()
    await first.sync.read_budgets()
    await second.sync.read_budgets()
    assert (first.is_admitted(), second.is_admitted()) == (False, False)


def make_usage(tokens: int) -> Usage:
    return Usage(tokens, 0, tokens)


def test_reload_changes_the_limits_of_a_running_server(serve: Serve) -> None:
    running = serve({})
    with WebSocketClient(running) as client:
        settings = running.server.settings
        limited = msgspec.structs.replace(settings, limits=UsageLimits(requests_per_minute=2))
        running.do(lambda: running.server._app.apply_settings(limited))
        client.create()
        while client.next()["type"] != "response.completed":
            pass
        assert [ask(running).status for _ in range(2)] == [200, 429]
        higher = msgspec.structs.replace(settings, limits=UsageLimits(requests_per_minute=3))
        running.do(lambda: running.server._app.apply_settings(higher))
        assert [ask(running).status for _ in range(2)] == [200, 429]
        running.do(lambda: running.server._app.apply_settings(settings))
        assert [ask(running).status for _ in range(2)] == [200, 200]
