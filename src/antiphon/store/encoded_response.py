"""The JSON of a response as it was encoded for the store."""

from antiphon.offload import LARGE_BYTES
from antiphon.protocol.response import Response


class EncodedResponse:
    """The JSON of a response, to send the client what was encoded for the store.

    A store that encodes a response sets `output`, the JSON of its output, and `body`, the JSON of the response with an
    empty output.
    """

    __slots__ = ("body", "output")

    def __init__(self) -> None:
        self.output = self.body = b""

    def join(self, response: Response) -> bytes | None:
        """Return the JSON of the whole response, or None if it has to be encoded. A large one is not copied."""
        if not self.body or response.error is not None or type(response.instructions) is list:
            return None
        if len(self.body) + len(self.output) > LARGE_BYTES:
            return None
        # The fields before the output are texts and numbers, and texts have no quote without a backslash.
        start = self.body.find(b'"output":[]') + len(b'"output":')
        return b"".join((self.body[:start], self.output, self.body[start + len(b"[]") :]))
