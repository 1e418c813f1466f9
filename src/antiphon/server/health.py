"""The handlers of /, /healthz and /readyz. Unauthenticated: they expose no data."""

from typing import ClassVar, Literal

from msgspec import Struct

from antiphon.engine.engine import Engine
from antiphon.errors import Unavailable
from antiphon.server.http import HttpRequest
from antiphon.server.router import Operation


class Greeting(Struct):
    name: str = "antiphon"
    api: str = "The Responses API"
    responses: str = "/v1/responses"
    models: str = "/v1/models"
    document: str = "/openapi.json"


class Health(Struct):
    status: Literal["ok", "ready"]


class HealthHandlers:
    """One method per operation that needs no key."""

    operations: ClassVar[dict[str, Operation]] = {
        "greet": Operation(id="greet", summary="List the main paths of the server.", response_type=Greeting),
        "live": Operation(id="checkLife", summary="Check that the process is running.", response_type=Health),
        "ready": Operation(
            id="checkReadiness",
            summary="Check that the models are loaded and the store can be written to.",
            response_type=Health,
            errors=(Unavailable,),
        ),
    }

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def greet(self, http_request: HttpRequest) -> None:
        """List the main paths, for people who open the address in a browser."""
        await http_request.respond_with(Greeting())

    async def live(self, http_request: HttpRequest) -> None:
        """Report that the process is running."""
        await http_request.respond_with(Health("ok"))

    async def ready(self, http_request: HttpRequest) -> None:
        """Report that the models are loaded and the store can be written to. Raises Unavailable otherwise."""
        await self._engine.check_ready()
        await http_request.respond_with(Health("ready"))
