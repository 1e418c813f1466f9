"""The transport to an engine of this process, without a socket."""

import logging
from typing import Any, Protocol

from antiphon.agent.transports.base import Events
from antiphon.errors import AntiphonError, ServerError
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest

logger = logging.getLogger(__name__)


class EngineRun(Protocol):
    """The part of the engine's `Run` that the transport uses."""

    def events(self) -> Events: ...


class RequestEngine(Protocol):
    """The part of an engine that the transport uses. The owner of the engine starts and closes it."""

    async def create(self, request: CreateRequest, *, project: str) -> EngineRun: ...


class LocalTransport:
    """Sends requests directly to an engine."""

    def __init__(self, engine: RequestEngine, *, project: str = "default") -> None:
        self._engine = engine
        self._project = project

    async def stream(self, request: dict[str, Any]) -> Events:
        decoded = codec.decode_request(codec.encode(request | {"stream": True})).body
        try:
            return (await self._engine.create(decoded, project=self._project)).events()
        except AntiphonError:
            raise
        except Exception as error:
            # Over HTTP this would be an error response of the server.
            logger.exception("the engine failed")
            raise ServerError(f"The model cannot be used: {type(error).__name__}. See the log.") from error

    async def close(self) -> None:
        """Do nothing: the owner closes the engine."""
