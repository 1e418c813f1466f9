"""Whatever a model says through one server is said again through another."""

import itertools
import json
from typing import Any

from hypothesis import given

from antiphon.backends.responses.reader import ResponsesReader
from antiphon.protocol import codec
from antiphon.protocol.response import Response
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer
from antiphon.stream.sse import encode_batch
from support.replay import replay
from support.turns import turns


def tell(turn: list[d.Delta]) -> tuple[bytes, dict[str, Any]]:
    """The stream of a turn, and the response it comes to."""
    numbers = itertools.count()
    response = Response(id="resp_up", created_at=1, model="m")
    composer = Composer(response, new_id=lambda prefix: f"{prefix}_up{next(numbers)}", now=lambda: 9)
    stream = encode_batch([*composer.start(), *composer.compose(turn)])
    return stream, json.loads(codec.encode(composer.response))


def _without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in output]


@given(turns)
def test_an_answer_comes_to_the_same_behind_two_servers(turn: list[d.Delta]) -> None:
    stream, told = tell(turn)
    retold = replay(ResponsesReader, [stream])[-1]["response"]
    assert _without_ids(retold["output"]) == _without_ids(told["output"])
    same = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "failed"}
    assert retold["status"] == same[told["status"]]
    assert retold["incomplete_details"] == told["incomplete_details"]
    if told["status"] in ("completed", "incomplete"):
        assert retold["usage"] == told["usage"]


@given(turns)
def test_its_ids_are_its_own(turn: list[d.Delta]) -> None:
    stream, _ = tell(turn)
    ids = [item.get("id") for item in replay(ResponsesReader, [stream])[-1]["response"]["output"]]
    assert len(set(ids)) == len(ids)
    assert not any("_up" in str(each) for each in ids)
