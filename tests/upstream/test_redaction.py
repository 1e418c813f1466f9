"""Redaction of keys, host names and addresses."""

import base64
import html
import json
import urllib.parse
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.upstream.error_mapping import map_error_response
from antiphon.upstream.redaction import redact


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (
            "Incorrect API key provided: sk-abc***xyz. See https://acme.test/keys.",
            "Incorrect API key provided: *** See [URL]",
        ),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("Invalid key: acme-1a2b********c3d4!", "Invalid key: ***!"),
        ("2 ** 3 is 8, and *** is a mark", "2 ** 3 is 8, and *** is a mark"),
        ("key gsk_0123456789abc is bad", "key *** is bad"),
        ("cannot connect to 10.1.2.3:8000!", "cannot connect to [address]!"),
        ("cannot connect to 10.1.2.3!", "cannot connect to [address]!"),
        ("cannot connect to [fe80::1]:80", "cannot connect to [address]"),
        ("cannot connect to vllm.internal:8000 now", "cannot connect to [address] now"),
        ("cannot connect to localhost:8000", "cannot connect to [address]"),
        ("HTTPConnectionPool(host='vllm', port=8000): Max retries", "HTTPConnectionPool([address]): Max retries"),
        ("postgres://me:pw@db/x failed", "[URL] failed"),
        ("at https%3A%2F%2Fme%3Apw%40db%2Fx now", "at [URL] now"),
        ("cannot log in as me:hunter2@db.internal", "cannot log in as ***"),
        ("GET /v1/models?key=abcdef0123&x=1", "GET /v1/models?key=***&x=1"),
        ("bad api_key=abcdef0123", "bad api_key=***"),
        (
            "at line 3:17, ratio 2:1, version 1.2.3, 50.5% of [1, 2]",
            "at line 3:17, ratio 2:1, version 1.2.3, 50.5% of [1, 2]",
        ),
        ("risk-free task_name disk-usage", "risk-free task_name disk-usage"),
        ("", ""),
    ],
)
def test_redact_masks_keys_urls_and_addresses_only(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@given(
    st.text(max_size=30),
    st.text(st.characters(codec="ascii", exclude_characters="*"), min_size=8, max_size=20),
    st.text(max_size=30),
)
def test_redact_leaves_no_secret(before: str, secret: str, after: str) -> None:
    assert secret not in redact(before + secret + after, [secret])


def test_redact_masks_longer_secret_first() -> None:
    assert redact("see secret-and-more", ["secret", "secret-and-more"]) == "see ***"


SECRET = "Ke+/y: 0123~abcdef"
FORMS: dict[str, Callable[[str], str]] = {
    "URL-encoded": lambda secret: urllib.parse.quote(secret, safe=""),
    "URL-encoded, small letters": lambda secret: urllib.parse.quote(secret, safe="").lower(),
    "URL-encoded with plus": urllib.parse.quote_plus,
    "URL-encoded completely": lambda secret: "".join(f"%{ord(each):02X}" for each in secret),
    "URL-encoded twice": lambda secret: urllib.parse.quote(urllib.parse.quote(secret, safe=""), safe=""),
    "JSON": lambda secret: json.dumps(secret).replace("/", "\\/"),
    "JSON escapes": lambda secret: "".join(f"\\u{ord(each):04x}" for each in secret),
    "JSON in JSON": lambda secret: json.dumps(json.dumps("".join(f"\\u{ord(each):04X}" for each in secret))),
    "Python escapes": lambda secret: "".join(f"\\x{ord(each):02x}" for each in secret),
    "HTML": lambda secret: "".join(f"&#{ord(each)};" for each in html.escape(secret)),
    "hexadecimal": lambda secret: secret.encode().hex(),
    "hexadecimal capitals": lambda secret: secret.encode().hex().upper(),
    "hexadecimal with colons": lambda secret: secret.encode().hex(":"),
    "reversed": lambda secret: secret[::-1],
    "reversed and quoted": lambda secret: urllib.parse.quote(secret[::-1], safe=""),
}
for offset in range(3):
    FORMS |= {
        f"base64 at {offset}": lambda secret, offset=offset: base64.b64encode(
            b"x" * offset + secret.encode() + b"yz"
        ).decode(),
        f"URL-safe base64 at {offset}": lambda secret, offset=offset: base64.urlsafe_b64encode(
            b"x" * offset + secret.encode()
        ).decode(),
        f"quoted base64 at {offset}": lambda secret, offset=offset: urllib.parse.quote(
            base64.b64encode(b"?" * offset + secret.encode()), safe=""
        ),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("secret", [SECRET, "sk-proj-0123456789abcdef0123456789"])
def test_redact_masks_encoded_secrets(form: str, secret: str) -> None:
    leaked = FORMS[form](secret)
    redacted = redact(f"The key ({leaked}) is wrong.", [secret])
    assert redacted.startswith("The key (")
    assert redacted.endswith(") is wrong.")
    longest = max(redacted[9:-11].replace("[URL]", "").split("***"), key=len)
    assert len(longest) <= 6, redacted  # quotes, escapes and padding


def test_redact_leaves_similar_text() -> None:
    text = "The model 'abcdefgh' failed: dGhpcyBpcyBub3QgYSBzZWNyZXQ= 736563726574 %20"
    assert redact(text, [SECRET, "short"]) == text


def test_secret_at_the_cut_of_a_long_message_is_masked() -> None:
    for start in range(1960, 2001, 5):
        message = "x" * start + SECRET + "y" * 3000
        error = map_error_response(400, json.dumps({"error": {"message": message}}).encode(), secrets=[SECRET])
        assert SECRET[:4] not in error.message
        assert len(error.message) <= 2001
