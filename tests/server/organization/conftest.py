"""A server with keys of two projects, and the admin client of the official SDK."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import DefaultHttpxClient, OpenAI

from antiphon.config.limits import ModelPrice, ProjectSettings
from antiphon.config.settings import ApiKey
from support.live_server import HttpResponse, LiveServer, make_settings

ROOT, ADA = "sk-root", "sk-ada"
"""A key of the default project, which administers all projects, and one that administers its own."""


@pytest.fixture
def running() -> Iterator[LiveServer]:
    settings = make_settings(
        api_keys=(ApiKey(ROOT, id="root"), ApiKey(ADA, "ada")),
        projects={"configured": ProjectSettings()},
        prices={"scripted": ModelPrice(input=1e6, output=2e6)},
    )
    server = LiveServer({"models": ["scripted", "other"]}, settings)
    yield server
    server.stop()


@pytest.fixture
def make_admin(running: LiveServer) -> Iterator[Callable[..., OpenAI]]:
    clients: list[OpenAI] = []

    def make(key: str = ROOT) -> OpenAI:
        unsecured = DefaultHttpxClient(verify=False)
        client = OpenAI(
            base_url=f"{running.url}/v1", api_key=key, admin_api_key=key, max_retries=0, http_client=unsecured
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def send(running: LiveServer) -> Callable[..., HttpResponse]:
    def send(method: str, path: str, body: Any = None, *, key: str = ROOT) -> HttpResponse:
        return running.ask(method, f"/v1{path}", body, headers={"Authorization": f"Bearer {key}"})

    return send
