"""CPU time of single decoding, encoding and composing steps in this process, compared with the skeleton."""

import itertools
import json
import time
from collections.abc import Callable

from antiphon.protocol.codec import decode_request
from antiphon.protocol.events import OutputTextDelta
from antiphon.protocol.response import Response
from antiphon.stream import sse
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Text
from benchmarks import skeleton
from benchmarks.workloads import TEN_ITEMS

Step = Callable[[], object]

ITEM_ID = "msg_019a8a3c6f2b0123456789abcdef0123456789abcdef"


def make_steps() -> dict[str, tuple[Step, Step]]:
    """Return the skeleton's step and ours, by name."""
    body = json.dumps({"model": "short", "input": TEN_ITEMS}).encode()
    small = skeleton.TextDelta(7, ITEM_ID, 0, 0, " platform")
    event = OutputTextDelta(7, ITEM_ID, 0, 0, " platform")
    return {
        "decode a request of 10 items": (lambda: skeleton.decode(body), lambda: decode_request(body)),
        "encode a text delta": (lambda: skeleton.encode_event(small), lambda: sse.encode_event(event)),
        "compose a text delta": (_make_skeleton_compose(), _make_compose()),
    }


def _make_skeleton_compose() -> Step:
    numbers = itertools.count()
    written: list[str] = []

    def make() -> None:
        written.append(" platform")
        [skeleton.TextDelta(next(numbers), ITEM_ID, 0, 0, " platform")]

    return make


def _make_compose() -> Step:
    response = Response(id="resp_1", created_at=0, model="short")
    composer = Composer(response, new_id=lambda prefix: ITEM_ID, now=lambda: 0)
    composer.start()
    batch = (Text(" platform"),)
    return lambda: composer.compose(batch)


def measure(*, rounds: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return pairs of microseconds for each step: of the skeleton, and of our code."""
    compared = make_steps()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, (base, ours) in compared.items():
            found[name].append((_time(base, repeats), _time(ours, repeats)))
    return found


def _time(step: Step, repeats: int) -> float:
    turns = itertools.repeat(None, repeats)
    began = time.process_time()
    for _ in turns:
        step()
    return (time.process_time() - began) / repeats * 1e6
