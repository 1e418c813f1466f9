"""The interface for metrics: reports of the engine about its responses and the writes of its store."""

from typing import Protocol

from antiphon.protocol.response import Response, Usage


class EngineObserver(Protocol):
    """Receives reports. Its methods must be quick and must not raise."""

    def count_response(self, response: Response, model: str) -> None:
        """Count a response that has ended, and its tokens under the name of the backend's model."""

    def count_tokens(self, model: str, usage: Usage | None) -> None:
        """Count the tokens of a model call that has no response of its own."""

    def count_write(self, seconds: float, failures: int) -> None:
        """Count a batch of writes and its failures. The store may call this in a thread of its own."""
