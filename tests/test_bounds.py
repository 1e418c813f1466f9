"""Caches by project, key, model and origin do not grow without end."""

import pytest

from antiphon.bounds import remove_oldest
from antiphon.config.limits import ProjectSettings, UsageLimits
from antiphon.engine import storage_quota, usage
from antiphon.engine.storage_quota import StorageQuota
from antiphon.engine.usage import UsageRecorder
from antiphon.errors import UpstreamError
from antiphon.protocol.response import InputTokensDetails, Usage
from antiphon.server import auth
from antiphon.server.auth import Authenticator
from antiphon.server.limits import limiter
from antiphon.server.limits.limiter import Limiter
from antiphon.store.keys import StoredKey
from antiphon.store.memory.store import MemoryStore
from antiphon.upstream import circuit_breaker, outbound, whole_answers
from antiphon.upstream.circuit_breaker import CircuitBreaker
from antiphon.upstream.http1.request import Origin
from antiphon.upstream.options import UpstreamOptions
from antiphon.upstream.outbound import OutboundClient, OutboundRules
from antiphon.upstream.whole_answers import WholeAnswers
from support.live_server import make_settings

NAMES = [f"name_{number}" for number in range(20)]


def test_oldest_entries_are_removed() -> None:
    entries = dict.fromkeys("abcde")
    remove_oldest(entries, 5)
    assert list(entries) == list("abcde")
    remove_oldest(entries, 2)
    assert list(entries) == ["d", "e"]


def test_projects_that_need_streaming_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answers, "_MAX_PROJECTS", 3)
    answers = WholeAnswers("there", UpstreamOptions(base_url="http://localhost"), now=lambda: 0.0)
    for project in NAMES:
        answers.require_streaming(project, UpstreamError("x"))
    assert [project for project in NAMES if not answers.are_possible(project)] == NAMES[-3:]


def test_projects_with_failures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "_MAX_PROJECTS", 3)
    now = 0.0
    circuit = CircuitBreaker("there", now=lambda: now)
    for project in NAMES:
        now += 100
        with pytest.raises(UpstreamError), circuit.guard(project) as guard:
            guard.request = project.encode()
            raise UpstreamError("x")
    assert list(circuit._project_circuits) == NAMES[-3:]


async def test_pools_without_connections_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "_MAX_POOLS", 3)
    async with OutboundClient(OutboundRules()) as client:
        for name in NAMES:
            client._get_pool(Origin("http", name, 80))
        assert len(client._pools) <= 3


async def test_recorded_uses_of_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_MAX_VERIFIED", 3)
    authenticator = Authenticator((), store=MemoryStore())
    for number, name in enumerate(NAMES):
        authenticator._note_use(StoredKey(name, bytes([number]), "p", name, ("inference",), 0), 1000.0)
    assert list(authenticator._recorded_uses) == NAMES[-2:]
    await authenticator.close()


async def test_model_names_of_all_projects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_MAX_NAMES", 5)
    recorder = UsageRecorder(MemoryStore(), {})
    for project in NAMES:
        for model in ("a", "b"):
            recorder.record(project, "", model, Usage(1, 1, 2, InputTokensDetails()))
    assert sum(map(len, recorder._models.values())) <= 5
    await recorder.close()


async def test_measurements_of_projects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_quota, "_MAX_PROJECTS", 3)
    quota = StorageQuota(MemoryStore(), 10, {})
    for project in NAMES:
        await quota.check(project)
    assert list(quota._measurements) == NAMES[-3:]


def test_keys_without_limits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "_MAX_SUBJECTS", 3)
    limits = Limiter(make_settings(projects={"p": ProjectSettings(limits=UsageLimits(requests_per_minute=100))}))
    for name in NAMES:
        limits.admit("q", name).release()
        limits.admit("p", name).release()
    assert len(limits._by_request) <= 4
    assert len(limits._subjects) == 1
