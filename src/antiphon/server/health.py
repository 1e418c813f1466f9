"""The handlers that tell how the server does. They need no key, and say nothing worth one."""

from typing import Literal

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.errors import Unavailable
from antiphon.server.http import Exchange


class Greeting(Struct):
    name: str = "antiphon"
    api: str = "The Responses API"
    responses: str = "/v1/responses"
    models: str = "/v1/models"
    document: str = "/openapi.json"


class Health(Struct):
    status: Literal["ok", "ready"]


class HealthHandlers:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def greet(self, exchange: Exchange) -> None:
        """For whoever opens the address in a browser."""
        await exchange.answer_with(Greeting())

    async def live(self, exchange: Exchange) -> None:
        """The process is up."""
        await exchange.answer_with(Health("ok"))

    async def ready(self, exchange: Exchange) -> None:
        """The models are loaded and the store is open."""
        if not self._engine.ready:
            raise Unavailable("The server is not ready.")
        await exchange.answer_with(Health("ready"))
