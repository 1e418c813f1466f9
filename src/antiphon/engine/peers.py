"""The interface to other processes that serve the same clients on the same store: the workers of one server."""

from typing import Protocol

from antiphon.protocol.response import Response


class Peers(Protocol):
    """The other workers. A foreground response is in the store once it has ended. Until then, one worker has it."""

    async def cancel(self, project: str, response_id: str) -> Response | None:
        """Cancel a foreground response of another worker, and return it."""

    async def retrieve(self, project: str, response_id: str) -> Response | None:
        """Return a foreground response that another worker has begun."""

    def announce_change(self, kind: str, response_id: str) -> None:
        """Announce a change of a background response, with a kind of `RunQueue.on_change`."""
