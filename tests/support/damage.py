"""Recorded streams with something wrong in them: what no server was seen to send yet."""

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

_LAST = ("response.completed", "response.incomplete", "response.failed")


def read_objects(corpus: Path) -> list[Any]:
    """The objects that all streams of a corpus are made of."""
    return [each for path in sorted(corpus.glob("*.sse")) for each in _read_stream(path)]


def _read_stream(path: Path) -> list[Any]:
    decoder = SseDecoder()
    messages = decoder.feed(path.read_bytes()) + decoder.close()
    return [json.loads(message.data) for message in messages if message.data.startswith((b'{"', b"[{"))]


def damage(value: Any, draw: Callable[..., Any]) -> Any:
    """The value with something within it replaced by something else."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return value | {name: damage(value[name], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [damage(value[0], draw), *value[1:]]
    return draw(strategies.json_values())


def replay_damaged(objects: list[Any], make_reader: Callable[[], Reader], data: st.DataObject) -> list[Json]:
    """The last events, of which there should be one, of a stream that has both the good and the damaged objects."""
    chosen = data.draw(st.lists(st.sampled_from(objects), max_size=4))
    damaged = [damage(each, data.draw) for each in chosen]
    raw = b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in [*damaged, *chosen])
    events = replay(make_reader, [raw + b"data: [DONE]\n\n"])
    # By their type: an event that nobody knows passes as it came, whatever it holds.
    return [event for event in events if event["type"] in _LAST]
