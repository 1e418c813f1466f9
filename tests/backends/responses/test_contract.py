"""The contract's own list of tests, by the names it gives them, on the requests that go out."""

import json
from typing import Any

import pytest

from antiphon.backends.base import Turn
from antiphon.backends.responses.backend import Options
from antiphon.backends.responses.request import Writer
from antiphon.protocol import codec
from antiphon.protocol.content import InputText
from antiphon.protocol.items import Message

STANDARD, AZURE = "https://api.openai.com/v1", "https://my-resource.openai.azure.com"
REQUIRED = {
    "model",
    "instructions",
    "input",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "store",
    "stream",
    "include",
}


def write(base_url: str = STANDARD, **asked: Any) -> dict[str, Any]:
    whole = {"model": "gpt-5", "instructions": "You are a helpful assistant.", "input": "unread"} | asked
    request = codec.decode_request(json.dumps(whole).encode()).request
    turn = Turn(request=request, items=[Message("user", [InputText("Hello")])])
    written: dict[str, Any] = json.loads(Writer("up", Options(base_url=base_url)).write(turn).body)
    return written


def test_responses_api_request_required_fields() -> None:
    assert set(write()) == REQUIRED


def test_literal_types_enforced() -> None:
    written = write()
    assert (written["tool_choice"], written["parallel_tool_calls"], written["stream"]) == ("auto", False, True)


@pytest.mark.parametrize(("base_url", "store"), [(AZURE, True), (STANDARD, False)])
def test_azure_store_flag(base_url: str, *, store: bool) -> None:
    assert write(base_url)["store"] is store


def test_include_array_reasoning() -> None:
    asked = write(reasoning={"effort": "medium", "summary": True})
    assert (asked["include"], write()["include"]) == (["reasoning.encrypted_content"], [])


def test_serialization_omits_undefined() -> None:
    optional = {"reasoning": {"effort": "medium"}, "prompt_cache_key": "conv_123", "text": {"verbosity": "medium"}}
    written = write(**optional)
    assert {name: written[name] for name in optional} == optional
    assert set(written) == REQUIRED | set(optional)
    assert not set(write()) & set(optional)
