"""The API keys in a store. The keys themselves are not stored, only their SHA-256."""

import hashlib
import secrets
from collections.abc import Iterable
from typing import NamedTuple, Protocol

KEY_PREFIX = "sk-antiphon-"

_SECRET_BYTES = 32
_ID_BYTES = 12


def compute_digest(key: bytes) -> bytes:
    """Return the digest under which a key is stored. Keys are random, so a fast hash is enough."""
    return hashlib.sha256(key).digest()


class StoredKey(NamedTuple):
    """An API key. `digest` is the SHA-256 of its text. Times are in seconds since 1970."""

    id: str
    digest: bytes
    project: str
    name: str
    scopes: tuple[str, ...]
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    last_used_at: int | None = None


def generate_secret() -> str:
    """Return the text of a new key."""
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def generate_key(
    project: str, name: str, scopes: Iterable[str], *, created_at: int, expires_at: int | None = None
) -> tuple[StoredKey, str]:
    """Return a new key and its text, which is not stored."""
    secret = generate_secret()
    key = StoredKey(
        id=f"key_{secrets.token_hex(_ID_BYTES)}",
        digest=compute_digest(secret.encode()),
        project=project,
        name=name,
        scopes=tuple(sorted(set(scopes))),
        created_at=created_at,
        expires_at=expires_at,
    )
    return key, secret


class KeyStore(Protocol):
    """The API keys of all projects. Revoked and expired keys stay, so that the list shows them."""

    async def save_key(self, key: StoredKey) -> None:
        """Save a new key. Its id and its digest must be new."""

    async def find_key(self, digest: bytes) -> StoredKey | None:
        """Return the key with this digest, or None. It may be revoked or expired."""

    async def list_keys(self) -> list[StoredKey]:
        """Return all keys, the oldest first."""

    async def has_keys(self) -> bool:
        """Return True if there is a key. A revoked or expired one counts too."""

    async def revoke_key(self, key_id: str, revoked_at: int) -> bool:
        """Revoke a key. Return False if there is none, or if it is revoked already."""

    async def rotate_key(self, key_id: str, digest: bytes, expires_at: int | None) -> bool:
        """Replace the digest and the expiry of a key. Return False if there is none, or if it is revoked."""

    async def record_key_use(self, key_id: str, used_at: int, *, interval: int) -> None:
        """Set the last use of a key, unless it is less than `interval` seconds old."""
