"""Sealing: encrypt and authenticate data that clients store for the server, and manage the keys.

Sealed text is bound to a project and a purpose. Sealing the same payload twice gives the same text, so that a run
repeated after a crash emits the same events. The nonce is therefore derived from the content, as in SIV modes: equal
nonces then mean equal contents.
"""

import base64
import functools
import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_PREFIX = "ant1."
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12


class _Key:
    """A secret with its id, and the keys derived from it: one for encryption, one for nonces, one for digests."""

    def __init__(self, secret: bytes) -> None:
        self.key_id = hashlib.sha256(b"name" + secret).digest()[:_KEY_ID_BYTES]
        self._secret = secret
        self._nonce_key = hmac.digest(secret, b"nonce", "sha256")

    @functools.cached_property
    def _cipher(self) -> "AESGCM":
        # Imported for the first sealed content: the package takes six megabytes.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._secret, b"encrypt", "sha256"))

    def encrypt(self, payload: bytes, context: bytes) -> bytes:
        framed = len(context).to_bytes(8, "big") + context + payload
        nonce = hmac.digest(self._nonce_key, framed, "sha256")[:_NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, payload, context)

    def decrypt(self, sealed: bytes, context: bytes) -> bytes | None:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            return None

    def digest(self, payload: bytes) -> bytes:
        return hmac.digest(hmac.digest(self._secret, b"digest", "sha256"), payload, "sha256")


class Sealer:
    """Seals with its first key, and opens text that was sealed with any of its keys.

    `reload_secrets` loads the keys again when text has an unknown key id: another server may have added a key. It
    returns None if there is no change. It is called for every such text, of which a request can have many.
    """

    def __init__(
        self, secrets: Sequence[bytes], *, reload_secrets: Callable[[], Sequence[bytes] | None] | None = None
    ) -> None:
        self._keys = [_Key(secret) for secret in secrets]
        self._reload_secrets = reload_secrets

    def seal(self, payload: bytes, *, project: str, purpose: str) -> str:
        key = self._keys[0]
        sealed = key.key_id + key.encrypt(payload, _bind(project, purpose))
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode()

    def digest(self, payload: bytes) -> str:
        """Return a digest that only a holder of the first key can compute."""
        return self._keys[0].digest(payload).hex()

    def open(self, text: str, *, project: str, purpose: str) -> bytes | None:
        """Return the sealed payload. None if it was changed, or sealed with another key, project or purpose."""
        sealed = _decode(text)
        key = self._find_key(sealed[:_KEY_ID_BYTES]) if sealed else None
        return None if key is None else key.decrypt(sealed[_KEY_ID_BYTES:], _bind(project, purpose))

    def _find_key(self, key_id: bytes) -> _Key | None:
        found = next((key for key in self._keys if key.key_id == key_id), None)
        if found is None and self._reload_secrets is not None and self._reload(self._reload_secrets):
            found = next((key for key in self._keys if key.key_id == key_id), None)
        return found

    def _reload(self, reload_secrets: Callable[[], Sequence[bytes] | None]) -> bool:
        """Load the keys again. Return True if they may have changed. The key that seals stays the same."""
        try:
            secrets = reload_secrets()
        except ConfigError as error:
            logger.warning("cannot reload the seal keys: %s", error.message)
            return False
        if secrets is None:
            return False
        self._keys[1:] = [key for key in map(_Key, secrets) if key.key_id != self._keys[0].key_id]
        return True


def _bind(project: str, purpose: str) -> bytes:
    return f"{purpose}\0{project}".encode()


def _decode(text: str) -> bytes:
    if not text.startswith(_PREFIX):
        return b""
    try:
        sealed = base64.b64decode(text[len(_PREFIX) :], altchars=b"-_", validate=True)
    except ValueError:
        return b""
    # Several base64 texts decode to the same bytes. Accept only the canonical one.
    return sealed if _PREFIX + base64.urlsafe_b64encode(sealed).decode() == text else b""


def make_secret() -> bytes:
    return os.urandom(KEY_BYTES)


def read_secrets(lines: Sequence[str], *, origin: str) -> list[bytes]:
    """Decode keys of 32 bytes in base64. Raises ConfigError with the key's number, never its text."""
    secrets: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        try:
            secret = base64.b64decode(line.strip(), validate=True)
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"{origin}: key {number} is not {KEY_BYTES} bytes in base64.")
        secrets.append(secret)
    if not secrets:
        raise ConfigError(f"{origin}: at least one key is required.")
    return secrets


def load_secrets(path: Path) -> list[bytes]:
    """Load the keys of a file, one per line, newest first. Create the file (mode 0600) with a new key if missing."""
    try:
        if not path.exists():
            _create(path)
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise _make_file_error(path, error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the keys are not in base64.") from None
    return read_secrets([line for line in text.splitlines() if line.strip()], origin=str(path))


class KeyFile:
    """A key file that is read again only after it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, ...] | None = None

    def load(self) -> list[bytes]:
        self._version = self._find_version()
        return load_secrets(self._path)

    def reload(self) -> list[bytes] | None:
        """Return the keys, or None if the file is the same as at the last call, even if it could not be read then."""
        return None if self._find_version() == self._version else self.load()

    def _find_version(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def rotate_secrets(path: Path) -> int:
    """Add a new first key to the file. Return the number of keys."""
    secrets = [make_secret(), *load_secrets(path)]
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        _write(fresh, secrets)
        fresh.replace(path)
    except OSError as error:
        raise _make_file_error(path, error) from None
    return len(secrets)


def _make_file_error(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"The keys for sealed content cannot be stored in {path}: {reason}. Set data_dir or seal_keys.")


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    _write(fresh, [make_secret()])
    try:
        path.hardlink_to(fresh)
    except FileExistsError:  # another process created it first: use its key
        pass
    finally:
        fresh.unlink(missing_ok=True)


def _write(path: Path, secrets: Sequence[bytes]) -> None:
    text = "".join(f"{base64.b64encode(secret).decode()}\n" for secret in secrets)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
