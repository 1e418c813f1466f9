"""The transport without a socket: an engine of this process."""

import logging
from typing import Any, Protocol

from antiphon.agent.transports.base import Events
from antiphon.errors import AntiphonError, ServerError
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest

logger = logging.getLogger(__name__)


class Running(Protocol):
    def events(self) -> Events: ...


class EngineLike(Protocol):
    """What is needed of an engine. It is started, and closed, by whoever made it."""

    async def create(self, request: CreateRequest, *, project: str) -> Running: ...


class LocalTransport:
    """Sends requests straight into an engine."""

    def __init__(self, engine: EngineLike, *, project: str = "default") -> None:
        self._engine = engine
        self._project = project

    async def stream(self, request: dict[str, Any]) -> Events:
        asked = codec.decode_request(codec.encode(request | {"stream": True})).request
        try:
            return (await self._engine.create(asked, project=self._project)).events()
        except AntiphonError:
            raise
        except Exception as error:
            # Over HTTP it would be the server's error, and no reason for the client to break.
            logger.exception("the engine failed")
            raise ServerError(f"The model cannot be used: {type(error).__name__}. The log says more.") from error

    async def close(self) -> None:
        """The engine is not ours to close."""
