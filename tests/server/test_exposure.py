"""The check of the address that a server without keys listens on."""

from typing import Any

import pytest

from antiphon.config.loading import load
from antiphon.config.settings import Settings
from antiphon.errors import ConfigError
from antiphon.server.exposure import check_exposure


def make_settings(**overrides: Any) -> Settings:
    return load(None, {"HOME": "/home/ada"}, overrides)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"])
def test_loopback_host_needs_no_key(host: str) -> None:
    assert check_exposure(make_settings(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.7", "::ffff:10.0.0.1", "a" * 80])
def test_other_host_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"api_keys.*--insecure \(insecure = true\)"):
        check_exposure(make_settings(host=host))
    assert check_exposure(make_settings(host=host, api_keys=[{"key": "k"}])) is None
    assert check_exposure(make_settings(host=host, insecure=True)) == (
        f"insecure: anyone who can reach {host} can use this server, because it has no API keys"
    )
