"""Errors of the `mcp` package and of the packages that it uses, as texts."""

import pytest

pytest.importorskip("mcp")

from mcp.client.client import Client

from antiphon.tools.mcp_errors import describe_by_type, is_invalid_answer


def test_runtime_error_is_an_invalid_answer_only_if_the_package_raises_it() -> None:
    with pytest.raises(RuntimeError) as raised:
        _ = Client("http://127.0.0.1/mcp").session
    assert is_invalid_answer(raised.value)
    assert describe_by_type(raised.value) == "Client must be used within an async context manager"
    with pytest.raises(RuntimeError) as other:
        raise RuntimeError("Cannot send a request, as the client has been closed.")
    assert not is_invalid_answer(other.value)
    assert describe_by_type(other.value) == "RuntimeError: Cannot send a request, as the client has been closed."
