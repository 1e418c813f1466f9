"""Authentication: a bearer key identifies a project."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from antiphon.config import DEFAULT_PROJECT, ApiKey
from antiphon.errors import InvalidApiKey, OriginNotAllowed

CHALLENGE = (b"www-authenticate", b'Bearer realm="antiphon"')


class Authenticator:
    """Checks API keys. Without keys every request belongs to the default project.

    Without keys, requests of web pages from other origins are refused: any page open in a browser on this machine could
    otherwise use the models, and read their output over a WebSocket. With keys this check is not needed: such a page
    has no key.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._projects = [(_digest(key.key.encode()), key.project) for key in keys]
        # The keys that were presented and are valid. A dict compares two keys only if their secret hashes are equal, so
        # this lookup reveals nothing either.
        self._verified: dict[bytes, str] = {}

    def authenticate(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the project of the key in the headers. Raises InvalidApiKey or OriginNotAllowed."""
        if not self._projects:
            origin = headers.get(b"origin")
            if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
                raise OriginNotAllowed("Web pages of other origins need an API key: set api_keys.")
            return DEFAULT_PROJECT
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise InvalidApiKey("No API key was given: send it in the header 'Authorization: Bearer KEY'.")
        project = self._verified.get(key)
        if project is None:
            project = self._verified[key] = self._verify(key)
        return project

    def _verify(self, key: bytes) -> str:
        # All keys are compared, in constant time, so that the duration reveals nothing about them.
        presented = _digest(key)
        matches = [project for digest, project in self._projects if hmac.compare_digest(digest, presented)]
        if not matches:
            raise InvalidApiKey("The API key is not valid.")
        return matches[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
