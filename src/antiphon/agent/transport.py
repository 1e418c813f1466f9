"""How a request reaches a model: over HTTP, or straight into an engine of this process. Either way events come back."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from antiphon.protocol.events import Event
from antiphon.protocol.open import Unknown

Events = AsyncGenerator[Sequence[Event | Unknown], None]


class Transport(Protocol):
    """Takes requests of the Responses API, and streams what comes of them. Closing the stream stops the model."""

    async def stream(self, request: dict[str, Any]) -> Events:
        """Send a request. What is refused is raised here, as the error of ours that it is; the rest comes as events."""

    async def close(self) -> None:
        """Release the connections."""
