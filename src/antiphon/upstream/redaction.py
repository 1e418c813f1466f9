"""Redaction: remove keys, host names and addresses of upstreams from texts that clients see.

Known formats of keys are always removed. The strings in `UpstreamClient.secrets` are removed too: unchanged, and in the
forms in which a server may repeat them in an error (URL-encoded, escaped in JSON or HTML, in base64, in hexadecimal, or
reversed).
"""

import functools
import re
from base64 import b64encode
from collections.abc import Callable, Collection

# Shorter strings are not secrets, and would match inside ordinary words.
_MIN_SECRET_LENGTH = 4
# Encoded forms of shorter strings are too short to be certain.
_MIN_ENCODED_LENGTH = 8

# Some servers put a URL into JSON or into the query of another URL.
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*(?::|%3a)(?:/|\\/|%2f){2}[^\s\"'<>)\]}]+", re.IGNORECASE)
_USER_INFO = re.compile(r"[^\s/@:\"'=]{1,256}:[^\s/@\"']{1,256}@[a-z0-9\[][\w.:\]-]*", re.IGNORECASE)
_QUERY_KEY = re.compile(
    r"\b((?:api[-_]?|access[-_]?|auth[-_]?|secret[-_]?)?(?:key|token|secret|password|sig|signature))=[^\s&\"'<>)\]},;]{6,}",
    re.IGNORECASE,
)
_IPV4 = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\.\d)(?::\d{1,5})?"
_IPV6 = r"\[[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*\](?::\d{1,5})?"
_HOST_AND_PORT = r"\b(?:localhost|[a-z0-9_-]+(?:\.[a-z0-9_-]+)+):\d{2,5}\b"
_POOL_HOST = r"host='[^']*', port=\d+"  # the notation of urllib3's connection pools
_ADDRESS = re.compile(f"{_IPV6}|{_IPV4}|{_HOST_AND_PORT}|{_POOL_HOST}", re.IGNORECASE)
# Key formats of well-known servers. Some servers repeat a key half masked with asterisks.
_KEY = re.compile(
    r"\bBearer\s+\S+|\b(?:sk|gsk|xai|hf|nvapi|pk|rk)[-_][\w*.-]{6,}|\bAIza[\w-]{10,}|[\w.-]{0,64}\*{4,}[\w*.-]*",
    re.IGNORECASE,
)

_BASE64_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=")
# Characters with two forms: those of standard and of URL-safe base64, also URL-encoded.
_BASE64_FORMS = {"+": r"(?:[+-]|%2[bB])", "/": r"(?:[/_]|%2[fF])"}
_HEX_SEPARATOR = r"(?:[ :,-]|0x|\\x){0,3}"
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """Mask every secret, key, URL and network address in a text."""
    text = _URL.sub("[URL]", mask_secrets(text, secrets))
    text = _USER_INFO.sub("***", text)
    text = _KEY.sub("***", text)
    text = _QUERY_KEY.sub(r"\1=***", text)
    return _ADDRESS.sub("[address]", text)


def mask_secrets(text: str, secrets: Collection[str]) -> str:
    """Mask the secrets in a text, as they are and encoded."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "***")
    if text and secrets:
        for mask in _make_masks(frozenset(secrets)):
            text = mask(text)
    return text


@functools.lru_cache(maxsize=64)
def _make_masks(secrets: frozenset[str]) -> tuple[Callable[[str], str], ...]:
    """Return functions that mask encoded forms of the secrets."""
    long = sorted((secret for secret in secrets if len(secret) >= _MIN_ENCODED_LENGTH), key=len, reverse=True)
    if not long:
        return ()
    patterns = [write(secret) for secret in long for write in (_write_escaped, _write_reversed, _write_hex)]
    escaped = re.compile("|".join(patterns), re.IGNORECASE)
    encoded = re.compile("|".join(pattern for secret in long for pattern in _write_base64(secret)))
    return functools.partial(escaped.sub, "***"), functools.partial(_mask_base64, encoded)


def _write_escaped(secret: str) -> str:
    """Return a pattern for the secret in which any character may be escaped for URLs, JSON or HTML."""
    return "".join(map(_write_character, secret))


def _write_reversed(secret: str) -> str:
    return _write_escaped(secret[::-1])


@functools.cache
def _write_character(character: str) -> str:
    octets = "".join(f"%(?:25){{0,3}}{octet:02x}" for octet in character.encode("utf-8", "surrogatepass"))
    code = ord(character)
    forms = [
        rf"\\{{0,4}}{re.escape(character)}",
        f"(?i:{octets})",
        rf"(?i:\\{{1,4}}u{code:04x})",
        rf"(?i:\\{{1,4}}x{code:02x})",
        rf"(?i:&#(?:0{{0,4}}{code}|x0{{0,4}}{code:x});)",
    ]
    if character in _ENTITIES:
        forms.append(_ENTITIES[character])
    if character == " ":
        forms.append(r"\+")
    return f"(?:{'|'.join(forms)})"


def _write_hex(secret: str) -> str:
    octets = (f"{octet:02x}" for octet in secret.encode("utf-8", "surrogatepass"))
    return "(?i:" + _HEX_SEPARATOR.join(octets) + ")"


def _write_base64(secret: str) -> list[str]:
    """Return patterns for base64 that contains the secret, for the three positions at which it can begin.

    The characters at both ends also depend on the text around the secret. `_mask_base64` masks them.
    """
    data = secret.encode("utf-8", "surrogatepass")
    patterns: list[str] = []
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        encoded = b64encode(bytes(offset) + data).decode()
        certain = encoded[first : 8 * (offset + len(data)) // 6]
        patterns.append("".join(_BASE64_FORMS.get(character, character) for character in certain))
    return patterns


def _mask_base64(pattern: "re.Pattern[str]", text: str) -> str:
    """Mask each run of base64 in which the pattern is found."""
    masked: list[str] = []
    position = 0
    for found in pattern.finditer(text):
        start, end = found.span()
        if start < position:
            continue
        while start > position and text[start - 1] in _BASE64_CHARACTERS:
            start -= 1
        while end < len(text) and text[end] in _BASE64_CHARACTERS:
            end += 1
        masked += (text[position:start], "***")
        position = end
    return "".join(masked) + text[position:] if masked else text
