"""Redaction of keys, host names and addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
