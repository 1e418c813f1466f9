"""Recorded streams with damaged objects, to test input that no server has sent yet."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from antiphon.stream.sse import SseDecoder
from antiphon.upstream.delta_stream import Reader
from support import strategies
from support.replay import replay

Json = dict[str, Any]

_TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def read_objects(corpus: Path) -> list[Any]:
    """Return the JSON objects of all streams of a corpus."""
    return [each for path in sorted(corpus.glob("*.sse")) for each in _read_stream(path)]


def _read_stream(path: Path) -> list[Any]:
    decoder = SseDecoder()
    messages = decoder.feed(path.read_bytes()) + decoder.close()
    return [json.loads(message.data) for message in messages if message.data.startswith((b'{"', b"[{"))]


def damage(value: Any, draw: Callable[..., Any]) -> Any:
    """Return the value with a random part replaced by random JSON."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return value | {name: damage(value[name], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [damage(value[0], draw), *value[1:]]
    return draw(strategies.json_values())


def replay_damaged(objects: list[Any], make_reader: Callable[[], Reader], data: st.DataObject) -> list[Json]:
    """Replay a stream of damaged and intact objects. Return its terminal events; there should be exactly one."""
    chosen = data.draw(st.lists(st.sampled_from(objects), max_size=4))
    damaged = [damage(each, data.draw) for each in chosen]
    raw = b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in [*damaged, *chosen])
    events = replay(make_reader, [raw + b"data: [DONE]\n\n"])
    # Selected by type: events of unknown types are passed through unchanged.
    return [event for event in events if event["type"] in _TERMINAL]
