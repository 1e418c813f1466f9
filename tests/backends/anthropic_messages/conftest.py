"""Request bodies as the backend sends them."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from antiphon.backends.anthropic_messages.request import translate_request
from antiphon.backends.anthropic_messages.traits import find_traits
from antiphon.backends.base import Turn
from antiphon.protocol import codec
from support.anthropic_types import check_request

WriteBody = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def write_body() -> WriteBody:
    """Return a function that translates items and parameters, and validates the body with the official types."""

    def write(*items: Any, model: str = "claude-sonnet-4-5", **parameters: Any) -> dict[str, Any]:
        turn = make_turn(*items, model=model, **parameters)
        return check_request(msgspec.json.encode(translate_request(turn, find_traits(model)).body))

    return write


def make_turn(*items: Any, **parameters: Any) -> Turn:
    request = codec.decode_request(json.dumps({"input": "unread", **parameters}).encode()).body
    return Turn(request=request, items=codec.decode_items(json.dumps(items).encode()))
