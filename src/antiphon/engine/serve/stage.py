"""The base class of the serving stages that wrap a backend."""

from collections.abc import Awaitable, Callable, Sequence

from antiphon.backends.base import Backend, Capabilities, Model, Turn
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas


class Stage:
    """A backend around another one. A stage overrides the methods it changes; the rest is passed on."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.models: Callable[[], Sequence[Model]] = inner.models  # called for every request, so without a detour
        self.capabilities = self.extend(inner.capabilities)

    def extend(self, capabilities: Capabilities) -> Capabilities:
        """Return the capabilities of the inner backend together with those that the stage adds."""
        return capabilities

    async def start(self) -> None:
        await self.inner.start()
        # Some backends know their capabilities only after they have started.
        self.capabilities = self.extend(self.inner.capabilities)

    async def close(self) -> None:
        await self.inner.close()

    def stream(self, turn: Turn) -> Awaitable[Deltas]:
        # Not a coroutine: most turns pass most stages unchanged, and an await costs more than a call.
        return self.inner.stream(turn)

    async def count_tokens(self, turn: Turn) -> int:
        return await self.inner.count_tokens(turn)

    def describe_emulation(self, request: CreateRequest) -> list[str]:
        """Return warnings about the parts of a request that the stages emulate for the backend."""
        return self.inner.describe_emulation(request) if isinstance(self.inner, Stage) else []
