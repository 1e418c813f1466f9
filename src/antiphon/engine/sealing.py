"""Sealing: what clients carry for us, they can neither read nor change.

Sealed text is authenticated, and bound to the project and the purpose it was made for. Sealing the same thing twice
gives the same text: so a run that is repeated after a crash tells the same events. The nonce is therefore made from the
content (as SIV modes do), which is safe because equal nonces then mean equal contents.
"""

import base64
import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from antiphon.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_MARK = "ant1."
_NAME_BYTES = 4
_NONCE_BYTES = 12


class _Key:
    """A key by its name, with one key for each of its uses derived from it."""

    def __init__(self, secret: bytes) -> None:
        self.name = hashlib.sha256(b"name" + secret).digest()[:_NAME_BYTES]
        self._cipher = AESGCM(hmac.digest(secret, b"encrypt", "sha256"))
        self._nonces = hmac.digest(secret, b"nonce", "sha256")

    def encrypt(self, payload: bytes, context: bytes) -> bytes:
        measured = len(context).to_bytes(8, "big") + context + payload
        nonce = hmac.digest(self._nonces, measured, "sha256")[:_NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, payload, context)

    def decrypt(self, sealed: bytes, context: bytes) -> bytes | None:
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            return None


class Sealer:
    """Seals with the first of its keys, and opens what was sealed with any of them.

    `look_again` reads the keys anew: another server may seal with one that was made since this one started.
    """

    def __init__(self, secrets: Sequence[bytes], *, look_again: Callable[[], Sequence[bytes]] | None = None) -> None:
        self._keys = [_Key(secret) for secret in secrets]
        self._look_again = look_again

    def seal(self, payload: bytes, *, project: str, purpose: str) -> str:
        key = self._keys[0]
        sealed = key.name + key.encrypt(payload, _bind(project, purpose))
        return _MARK + base64.urlsafe_b64encode(sealed).decode()

    def open(self, text: str, *, project: str, purpose: str) -> bytes | None:
        """What was sealed; None if it was changed, or sealed by another server, for another project or purpose."""
        sealed = _decode(text)
        key = self._find(sealed[:_NAME_BYTES]) if sealed else None
        return None if key is None else key.decrypt(sealed[_NAME_BYTES:], _bind(project, purpose))

    def _find(self, name: bytes) -> _Key | None:
        found = next((key for key in self._keys if key.name == name), None)
        if found is None and self._look_again is not None:
            try:
                self._keys[1:] = [key for key in map(_Key, self._look_again()) if key.name != self._keys[0].name]
            except ConfigError as error:
                logger.warning("the keys cannot be read again: %s", error.message)
            found = next((key for key in self._keys if key.name == name), None)
        return found


def _bind(project: str, purpose: str) -> bytes:
    return f"{purpose}\0{project}".encode()


def _decode(text: str) -> bytes:
    if not text.startswith(_MARK):
        return b""
    try:
        sealed = base64.b64decode(text[len(_MARK) :], altchars=b"-_", validate=True)
    except ValueError:
        return b""
    # Base64 has several spellings of one thing: only ours is genuine.
    return sealed if _MARK + base64.urlsafe_b64encode(sealed).decode() == text else b""


def make_secret() -> bytes:
    return os.urandom(KEY_BYTES)


def read_secrets(lines: Sequence[str], *, origin: str) -> list[bytes]:
    """Keys as they are written: 32 bytes in base64 each. Raises ConfigError, without showing any."""
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
        raise ConfigError(f"{origin}: there must be a key.")
    return secrets


def load_secrets(path: Path) -> list[bytes]:
    """The keys of a file, one a line, the newest first. A file that is not there yet is made, for its owner alone."""
    try:
        if not path.exists():
            _create(path)
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise _fail(path, error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: these are not keys in base64.") from None
    return read_secrets([line for line in text.splitlines() if line.strip()], origin=str(path))


def rotate_secrets(path: Path) -> int:
    """Put a new key in front of those of the file. Returns how many there are then."""
    secrets = [make_secret(), *load_secrets(path)]
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        _write(fresh, secrets)
        fresh.replace(path)
    except OSError as error:
        raise _fail(path, error) from None
    return len(secrets)


def _fail(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"The keys for sealed content cannot be kept in {path}: {reason}. Set data_dir or seal_keys.")


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    _write(fresh, [make_secret()])
    try:
        path.hardlink_to(fresh)
    except FileExistsError:  # another process was quicker, and its key counts
        pass
    finally:
        fresh.unlink(missing_ok=True)


def _write(path: Path, secrets: Sequence[bytes]) -> None:
    text = "".join(f"{base64.b64encode(secret).decode()}\n" for secret in secrets)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
