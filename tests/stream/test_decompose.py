"""Events to deltas."""

from hypothesis import given

from antiphon.stream import deltas as d
from antiphon.stream.decompose import decompose_events
from support.composing import compose_replay
from support.turns import turns


@given(turns)
def test_composing_decomposed_events_gives_same_events(turn: list[d.Delta]) -> None:
    sent = compose_replay(turn[:-1])
    assert compose_replay(decompose_events(sent)) == sent
