"""The transport without a socket: an engine of this process."""

from typing import Any, Protocol

from antiphon.agent.transport import Events
from antiphon.protocol import codec
from antiphon.protocol.request import CreateRequest


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
        return (await self._engine.create(asked, project=self._project)).events()

    async def close(self) -> None:
        """The engine is not ours to close."""
