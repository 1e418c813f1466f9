from typing import Any

import pytest

from antiphon.backends.base import read_options
from antiphon.errors import ConfigError
from antiphon.upstream.client import UpstreamClient
from antiphon.upstream.options import UpstreamOptions

URL = "http://127.0.0.1:8000/v1"


class Special(UpstreamOptions, kw_only=True):
    """The options of a backend kind."""

    flavour: str = "plain"


def make(**options: Any) -> UpstreamClient:
    return UpstreamClient("there", read_options({"base_url": URL} | options, Special, name="there"), headers={})


def test_subclass_has_common_and_own_options() -> None:
    options = make(base_url=f"{URL}//", flavour="hot", idle_timeout=5).options
    assert options == Special(base_url=URL, flavour="hot", idle_timeout=5)
    assert (options.request_retries, options.stream_retries, options.verify_tls) == (4, 5, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": "ftp://x/v1"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": "http://"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": "http://[::1/v1"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": "http://x:port/v1"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": "http://a b/v1"}, "backends.there.base_url: not the address of a server"),
        ({"base_url": ""}, "backends.there.base_url: not the address of a server"),
        (
            {"base_url": "http://me:secret@x/v1"},
            "backends.there.base_url: user and password are not allowed",
        ),
        ({"base_url": "http://x/v1?key=secret"}, "backends.there.base_url: query and fragment are not allowed"),
        ({"base_url": 3}, "backends.there.base_url: Expected str, got int"),
        ({"api_key": "secret\n"}, "backends.there.api_key: must be one line of ASCII text"),
        ({"api_key": ""}, "backends.there.api_key: must be one line of ASCII text"),
        ({"headers": {"X-Y": "secret\r\nZ: 1"}}, "backends.there.headers.X-Y: must be one line of ASCII text"),
        ({"headers": {"X Y": "1"}}, "backends.there.headers: 'X Y' is not a valid header name"),
        ({"request_retries": 101}, "backends.there.request_retries: Expected int <= 100"),
        ({"stream_retries": -1}, "backends.there.stream_retries: Expected int >= 0"),
        ({"connect_timeout": 0}, "backends.there.connect_timeout: Expected float > 0.0"),
        ({"max_concurrent": 0}, "backends.there.max_concurrent: Expected int >= 1"),
        ({"models": [""]}, "backends.there.models[0]: Expected str of length >= 1"),
        ({"retries": 1}, "backends.there.retries: unknown option"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(**options)
    assert raised.value.message.startswith(message)
    assert "secret" not in raised.value.message


def test_base_url_is_required() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        read_options({}, Special, name="there")


def test_repr_hides_secrets() -> None:
    options = Special(base_url=URL, api_key="secret", headers={"X-Key": "secret"}, query={"key": "secret"})
    shown = repr(options)
    assert "secret" not in shown
    assert shown.startswith(f"Special(base_url='{URL}', api_key='***', headers=<X-Key>, query=<key>, models=None,")
