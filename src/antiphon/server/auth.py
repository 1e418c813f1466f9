"""Authentication: a bearer key identifies a project. Without keys, host names and origins are checked."""

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from antiphon.config.settings import DEFAULT_PROJECT, ApiKey
from antiphon.errors import AntiphonError, InsufficientScope, InvalidApiKey, OriginNotAllowed
from antiphon.server.host_rules import HostRules
from antiphon.server.scopes import ADMIN, Scope, find_highest_scope
from antiphon.store.keys import KEY_PREFIX, KeyStore, StoredKey, compute_digest

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5
"""A change of the keys in the store, such as a revocation, takes effect in this time on every process."""

CHALLENGE = (b"www-authenticate", b'Bearer realm="antiphon"')
# The last use of a key is written at most once in this time.
_USE_INTERVAL_SECONDS = 60
_MAX_VERIFIED = 10_000
# Clients such as LiteLLM recognise an error of the key by these words of OpenAI's message.
_INCORRECT_KEY = "Incorrect API key provided"


class Grant(NamedTuple):
    """The rights of a key. `check_at` is the time of the monotonic clock at which the store must be read again.

    `key_id` is empty without a key. `is_organization_wide`: with the scope `admin`, the key administers all projects,
    not only its own.
    """

    project: str
    scope: Scope
    check_at: float = math.inf
    key_id: str = ""
    is_organization_wide: bool = True


_WITHOUT_KEYS = Grant(DEFAULT_PROJECT, ADMIN)


class Authenticator:
    """Checks API keys. Without keys every request belongs to the default project and may do everything.

    Keys are those of the settings, which have all scopes, and those of the store. A valid key of the store is cached
    for `CHECK_SECONDS`. If the store cannot be read after that time, requests with the key fail, like all requests that
    need the store. A store that once had a key always requires one, even if all its keys are revoked.

    Without keys, requests of web pages from other origins are refused: any page open in a browser on this machine could
    otherwise use the models, and read their output over a WebSocket. With keys this check is not needed: such a page
    has no key. For the same reason the host name is checked without keys.

    `on_keys_required` is called when the first key is found in the store. `now` and `monotonic` are clocks, for tests.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        *,
        store: KeyStore | None = None,
        host: str = "127.0.0.1",
        allowed_hosts: Iterable[str] = (),
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_keys_required: Callable[[], None] | None = None
        self._host = host
        self._store = store
        self.has_stored_keys = False
        self._now = now
        self._monotonic = monotonic
        # The server looks for keys when it starts.
        self._next_look_at = monotonic() + CHECK_SECONDS
        # The `Authorization` headers with valid keys that were presented. A dict compares two of them only if their
        # secret hashes are equal, so this lookup reveals nothing either.
        self._verified: dict[bytes, Grant] = {}
        self.set_keys(keys, allowed_hosts=allowed_hosts)
        self._recorded_uses: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until the last uses of keys are written."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def set_keys(self, keys: Iterable[ApiKey], *, allowed_hosts: Iterable[str]) -> None:
        """Use these keys of the settings from now on, for open connections too."""
        self._fixed_keys = [
            (compute_digest(key.key.encode()), _make_fixed_grant(key, number)) for number, key in enumerate(keys, 1)
        ]
        self._verified.clear()
        self.requires_key = bool(self._fixed_keys) or self.has_stored_keys
        self._host_rules = None if self.requires_key else HostRules(host=self._host, allowed_hosts=allowed_hosts)
        if self.requires_key and self.on_keys_required is not None:
            self.on_keys_required()

    def require_keys(self) -> None:
        """Require a key from now on, because the store has one."""
        self.requires_key = self.has_stored_keys = True
        self._host_rules = None
        if self.on_keys_required is not None:
            self.on_keys_required()

    async def look_for_keys(self, headers: Mapping[bytes, bytes]) -> None:
        """Require keys if the store has one by now. The store is read at most once in `CHECK_SECONDS`.

        It is also read if the request has such a key: the request must not use the default project instead.
        """
        if self._monotonic() >= self._next_look_at or KEY_PREFIX.encode() in headers.get(b"authorization", b""):
            await self.search_store()

    async def search_store(self) -> None:
        """Require keys from now on if the store has one."""
        if self._store is None:
            return
        self._next_look_at = self._monotonic() + CHECK_SECONDS
        try:
            has_keys = await self._store.has_keys()
        except AntiphonError as error:  # the store logs its failures
            logger.debug("the store cannot be searched for API keys: %s", error)
            return
        if has_keys:
            self.require_keys()

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HostNotAllowed if the server has no keys and the request is for a host name that it does not accept.

        A request without `Host` is accepted. Browsers always send it.
        """
        if self._host_rules is not None and (header := headers.get(b"host")) is not None:
            self._host_rules.check(header)

    async def authenticate(self, headers: Mapping[bytes, bytes]) -> Grant:
        """Return the rights of the key in the headers. Raises InvalidApiKey or OriginNotAllowed."""
        if not self.requires_key:
            origin = headers.get(b"origin")
            if origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower():
                raise OriginNotAllowed("Web pages of other origins need an API key: set api_keys.")
            return _WITHOUT_KEYS
        return self.find_verified(headers) or await self._verify(headers.get(b"authorization", b""))

    def find_verified(self, headers: Mapping[bytes, bytes]) -> Grant | None:
        """Return the rights of the key in the headers if it was verified before and need not be checked again."""
        grant = self._verified.get(headers.get(b"authorization", b""))
        return (
            grant if grant is not None and (grant.check_at == math.inf or self._monotonic() < grant.check_at) else None
        )

    async def check_again(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise InvalidApiKey if the key of an open connection is not valid any more, or if a key is required now."""
        if not self.requires_key:
            await self.look_for_keys(headers)
        await self.authenticate(headers)

    async def _verify(self, header: bytes) -> Grant:
        scheme, _, key = header.partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise InvalidApiKey("No API key was given: send it in the header 'Authorization: Bearer KEY'.")
        # All keys are compared, in constant time, so that the duration reveals nothing about them.
        digest = compute_digest(key)
        matches = [fixed for each, fixed in self._fixed_keys if hmac.compare_digest(each, digest)]
        if matches:
            grant = matches[0]
        else:
            # The time starts before the store is read: a revocation during the read must not extend it.
            started_at = self._monotonic()
            stored = None if self._store is None else await self._store.find_key(digest)
            try:
                grant = self._make_grant(stored, started_at)
            except InvalidApiKey:
                self._verified.pop(header, None)
                raise
        if len(header) > len(scheme) + 1 + len(key):  # spaces could make any number of long headers with one key
            return grant
        if len(self._verified) >= _MAX_VERIFIED:
            self._verified.clear()
        self._verified[header] = grant
        return grant

    def _make_grant(self, stored: StoredKey | None, started_at: float) -> Grant:
        if stored is None:
            raise InvalidApiKey(f"{_INCORRECT_KEY}: this server does not know it.")
        if stored.revoked_at is not None:
            raise InvalidApiKey(f"{_INCORRECT_KEY}: it was revoked.")
        now = self._now()
        seconds = float(CHECK_SECONDS)
        if stored.expires_at is not None:
            if stored.expires_at <= now:
                raise InvalidApiKey(f"{_INCORRECT_KEY}: it has expired.")
            seconds = min(seconds, stored.expires_at - now)
        scope = find_highest_scope(stored.scopes)
        if scope is None:  # a newer version may have others
            raise InvalidApiKey("The API key has no scope that this server knows.")
        self._note_use(stored, now)
        return Grant(stored.project, scope, started_at + seconds, stored.id)

    def _note_use(self, stored: StoredKey, now: float) -> None:
        """Write the last use of a key in the background, unless it was written recently by any process."""
        last = max(stored.last_used_at or 0, self._recorded_uses.get(stored.id, 0))
        if now - last < _USE_INTERVAL_SECONDS:
            return
        if len(self._recorded_uses) >= _MAX_VERIFIED:
            self._recorded_uses.clear()  # the store does not write a use again too soon
        self._recorded_uses[stored.id] = now
        task = asyncio.get_running_loop().create_task(self._record_use(stored.id, int(now)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_use(self, key_id: str, used_at: int) -> None:
        assert self._store is not None, "the key was read from it"
        try:
            await self._store.record_key_use(key_id, used_at, interval=_USE_INTERVAL_SECONDS)
        except AntiphonError as error:  # the store logs its failures
            logger.debug("the last use of the key %s was not written: %s", key_id, error)


def _make_fixed_grant(key: ApiKey, number: int) -> Grant:
    """Return the rights of a key of the settings.

    Such keys have all scopes by default, and are given to the users of a project. So they administer only this project,
    except those of the default project.
    """
    return Grant(
        key.project,
        Scope[key.scope.upper()],
        key_id=key.id or f"settings-{number}",
        is_organization_wide=key.project == DEFAULT_PROJECT,
    )


def make_scope_error(scope: Scope, needed: Scope) -> InsufficientScope:
    return InsufficientScope(
        f"The API key has the scope '{scope.label}', but this request needs '{needed.label}'. "
        "Use another key, or create one with 'antiphon keys create --scope'."
    )
