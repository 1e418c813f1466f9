"""Who is asking: a bearer key stands for a project."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from antiphon.config import DEFAULT_PROJECT, ApiKey
from antiphon.errors import InvalidApiKey, OriginNotAllowed

CHALLENGE = (b"www-authenticate", b'Bearer realm="antiphon"')


class Gate:
    """Knows the keys. Without any the server is open, and every request belongs to the default project.

    It is open to programs, not to every web page that somebody has open on this machine: a page of another origin could
    have models work, and over a WebSocket read what they say. With keys it does not have one.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._projects = [(_digest(key.key.encode()), key.project) for key in keys]

    def admit(self, headers: Mapping[bytes, bytes]) -> str:
        """The project of the key in the headers. Raises InvalidApiKey, or OriginNotAllowed."""
        if not self._projects:
            origin = headers.get(b"origin")
            if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
                raise OriginNotAllowed("Pages of other origins are let in with an API key only: set api_keys.")
            return DEFAULT_PROJECT
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise InvalidApiKey("No API key was given: send it in the header 'Authorization: Bearer KEY'.")
        # Every key is compared, in constant time, so that the time taken tells nothing about any of them.
        presented = _digest(key.strip())
        matches = [project for digest, project in self._projects if hmac.compare_digest(digest, presented)]
        if not matches:
            raise InvalidApiKey("The API key is not known here.")
        return matches[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
