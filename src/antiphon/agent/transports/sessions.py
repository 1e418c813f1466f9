"""HTTP sessions of an agent: one for each event loop that uses it."""

import asyncio
from collections.abc import Mapping

from antiphon.agent.transports.base import make_headers
from antiphon.errors import AntiphonError
from antiphon.upstream.error_mapping import decode_json_or_text, map_api_error
from antiphon.upstream.http import HttpResponse, HttpSession


class LoopSessions:
    """The sessions with one server. Several event loops may use them at once, each in its own thread."""

    def __init__(self, url: str, *, api_key: str | None, headers: Mapping[str, str], connect_timeout: float) -> None:
        self._url = url
        self._headers = make_headers(headers, api_key)
        self._connect_timeout = connect_timeout
        self._sessions: dict[asyncio.AbstractEventLoop, HttpSession] = {}

    def open(self) -> HttpSession:
        """Return the session of this event loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for closed in [other for other in list(self._sessions) if other.is_closed()]:
                self._sessions.pop(closed, None)
            session = self._sessions[loop] = HttpSession(
                self._url, headers=self._headers, map_error=_map_error, connect_timeout=self._connect_timeout
            )
            session.open()
        return session

    async def close(self) -> None:
        """Release the connections of this event loop. Other loops may still use theirs."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


async def read_all(response: HttpResponse) -> bytes:
    chunks = []
    while chunk := await response.read():
        chunks.append(chunk)
    return b"".join(chunks)


def _map_error(status: int, body: bytes, retry_after: float | None) -> AntiphonError:
    return map_api_error(status, decode_json_or_text(body), retry_after=retry_after)
