"""What another server's words must not give away: our keys for it, and where it is."""

import re
from collections.abc import Collection

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)\]}]+", re.IGNORECASE)
_IPV4 = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\.\d)(?::\d{1,5})?"
_IPV6 = r"\[[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*\](?::\d{1,5})?"
_HOST_AND_PORT = r"\b(?:localhost|[a-z0-9_-]+(?:\.[a-z0-9_-]+)+):\d{2,5}\b"
_HOST_OF_A_POOL = r"host='[^']*', port=\d+"  # as urllib3 tells of its connections
_ADDRESS = re.compile(f"{_IPV6}|{_IPV4}|{_HOST_AND_PORT}|{_HOST_OF_A_POOL}", re.IGNORECASE)
# How keys of the usual servers look; some servers repeat a key half masked with stars.
_KEY = re.compile(
    r"\bBearer\s+\S+|\b(?:sk|gsk|xai|hf|nvapi|pk|rk)[-_][\w*.-]{6,}|\bAIza[\w-]{10,}|[\w.-]{0,64}\*{4,}[\w*.-]*",
    re.IGNORECASE,
)

# Shorter ones are no secrets, and would be found within other words.
_SHORTEST_SECRET = 4


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """The text with every secret, key, URL and network address blotted out."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "***")
    text = _URL.sub("[URL]", text)
    text = _KEY.sub("***", text)
    return _ADDRESS.sub("[address]", text)
