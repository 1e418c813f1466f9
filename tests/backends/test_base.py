from typing import Any

import pytest
from msgspec import Struct

from antiphon.backends.base import list_hint_parameters, read_options
from antiphon.errors import ConfigError
from antiphon.protocol import codec


class Options(Struct):
    threads: int = 1
    sizes: list[int] = []


class TestReadingOptions:
    def test_valid_options_become_the_struct(self) -> None:
        assert read_options({"threads": 2}, Options, name="local") == Options(threads=2)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"threads": "two"}, "backends.local.threads: Expected int, got str"),
            ({"sizes": [1, None]}, "backends.local.sizes[1]: Expected int, got null"),
            ({"thread": 2}, "backends.local.thread: unknown option; known are: threads, sizes"),
        ],
    )
    def test_wrong_option_is_named(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as raised:
            read_options(options, Options, name="local")
        assert raised.value.message == message

    def test_missing_option_is_named(self) -> None:
        class Needy(Struct):
            url: str

        with pytest.raises(ConfigError) as raised:
            read_options({}, Needy, name="local")
        assert raised.value.message == "backends.local: Object missing required field url"


class TestListingHints:
    def test_set_hint_parameters_are_listed(self) -> None:
        given = {"user": "u", "service_tier": "flex", "text": {"verbosity": "low"}, "client_metadata": {"a": "b"}}
        body = codec.encode({"model": "m", "input": "hi", "top_p": 0.5} | given)
        named = ["client_metadata", "service_tier", "user", "text.verbosity"]
        assert list_hint_parameters(codec.decode_request(body).body) == named

    @pytest.mark.parametrize("usual", [{"service_tier": "auto"}, {"service_tier": "default"}, {"client_metadata": {}}])
    def test_default_values_are_not_hints(self, usual: dict[str, object]) -> None:
        body = {"model": "m", "input": "hi"} | usual
        assert list_hint_parameters(codec.decode_request(codec.encode(body)).body) == []
