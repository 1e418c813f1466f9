"""Redaction: remove keys, host names and addresses of upstreams from texts that clients see.

`UpstreamClient.secrets` has the strings of an upstream that are removed in addition to known formats.
"""

import re
from collections.abc import Collection

# Shorter strings are not secrets, and would match inside ordinary words.
_MIN_SECRET_LENGTH = 4

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)\]}]+", re.IGNORECASE)
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


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """Mask every secret, key, URL and network address in a text."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "***")
    text = _URL.sub("[URL]", text)
    text = _KEY.sub("***", text)
    return _ADDRESS.sub("[address]", text)
