"""Limits on an answer, as the composer applies them."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from antiphon.protocol import events
from antiphon.protocol.content import LogProb, TopLogProb, UrlCitation
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response, ResponseError
from antiphon.protocol.unions import Unknown
from antiphon.stream import deltas as d
from antiphon.stream.composer import Composer, IllegalDelta
from antiphon.stream.limits import AnswerLimits

PIECE = "x" * 10
LOGPROBS = tuple(LogProb("a", 0.0, [97], [TopLogProb("b", 0.0, [98])]) for _ in range(5))
UNKNOWN = Unknown(b'{"type":"some.event","text":"0123456789"}')


TEXTS = ("text", "refusal", "reasoning", "summaries", "parts", "arguments", "input", "nameless calls")


def new_composer(**limits: int) -> Composer:
    serial = itertools.count(1)
    response = Response(id="resp_1", created_at=1, model="m")
    return Composer(response, new_id=lambda prefix: f"{prefix}_{next(serial)}", now=int, limits=AnswerLimits(**limits))


def compose_until_cut_off(composer: Composer, batches: Any) -> list[Any]:
    composed: list[Any] = [*composer.start()]
    for batch in batches:
        composed += composer.compose(batch)
        if composer.finished:
            return composed
    raise AssertionError("the answer was not cut off")


def repeat_content(name: str, number: int) -> list[d.Delta]:
    """Return deltas that can be repeated without end."""
    contents: dict[str, list[d.Delta]] = {
        "text": [d.Text(PIECE)],
        "logprobs": [d.Text("a", LOGPROBS)],
        "annotations": [d.Annotate(UrlCitation("https://a.example", "A", 0, 1))],
        "refusal": [d.Refusal(PIECE)],
        "reasoning": [d.Reasoning(PIECE)],
        "summaries": [d.ReasoningSummary(PIECE, number)],
        "parts": [d.Text(PIECE), d.NewPart()],
        "arguments": [d.ToolCall(0, PIECE, "f" if number == 0 else "")],
        "input": [d.CustomToolCall(0, PIECE, "f" if number == 0 else "")],
        "nameless calls": [d.ToolCall(number, PIECE)],
        "seals": [d.ReasoningSeal(PIECE)],
        "whole items": [d.WholeItem(Message("assistant", []))],
        "events": [d.Passthrough(UNKNOWN)],
        "amendments": [d.Text("a"), d.Amend({f"f{number}": msgspec.Raw(b'"0123456789"')})],
    }
    return contents[name]


@pytest.mark.parametrize(
    "name",
    [
        "text", "logprobs", "annotations", "refusal", "reasoning", "summaries", "parts", "arguments", "input",
        "nameless calls", "seals", "whole items", "events", "amendments",
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_one_batch", [False, True])
def test_every_kind_of_content_counts_as_bytes(name: str, in_one_batch: bool) -> None:
    batches: Any = (repeat_content(name, number) for number in range(1000))
    if in_one_batch:
        batches = [[delta for batch in batches for delta in batch]]
    limit = "max_answer_text_bytes" if name in TEXTS else "max_answer_bytes"
    composer = new_composer(**{limit: 500})
    last = compose_until_cut_off(composer, batches)[-1]
    assert isinstance(last, events.Failed)
    assert last.response.error == ResponseError(
        "answer_too_large",
        f"The answer was cut off: it exceeds the limit of 500 bytes{' of text' * (name in TEXTS)} (setting '{limit}').",
        None,
        "server_error",
    )
    assert composer.is_cut_off


def test_text_before_the_limit_is_in_the_response() -> None:
    composed = compose_until_cut_off(new_composer(max_answer_bytes=25), [[d.Text(PIECE)]] * 5)
    assert [event.type.removeprefix("response.") for event in composed[4:]] == [
        *["output_text.delta"] * 3,
        *["output_text.done", "content_part.done", "output_item.done", "error", "failed"],
    ]
    assert [event.sequence_number for event in composed] == list(range(len(composed)))
    [message] = composed[-1].response.output
    assert (message.content[0].text, message.status) == (3 * PIECE, "incomplete")


@pytest.mark.parametrize("name", ["whole items", "nameless calls", "seals"])
def test_items_are_limited(name: str) -> None:
    composer = new_composer(max_answer_items=7)
    last = compose_until_cut_off(composer, [repeat_content(name, number) for number in range(9)])[-1]
    assert "limit of 7 output items (setting 'max_answer_items')" in last.response.error.message
    assert len(last.response.output) == (0 if name == "nameless calls" else 8)


@pytest.mark.parametrize("name", ["text", "summaries", "parts", "events"])
def test_events_are_limited(name: str) -> None:
    composer = new_composer(max_answer_events=20)
    composed = compose_until_cut_off(composer, (repeat_content(name, number) for number in range(99)))
    assert "limit of 20 events (setting 'max_answer_events')" in composed[-1].response.error.message
    assert len(composed) < 35


def test_answer_at_the_limits_is_complete() -> None:
    composer = new_composer(max_answer_bytes=20, max_answer_items=1, max_answer_events=20)
    composed: Sequence[Any] = compose_until_cut_off(composer, [[d.Text(PIECE), d.Text(PIECE), d.Finish()]])
    assert (composed[-1].response.status, composer.is_cut_off) == ("completed", False)


def test_delta_after_the_cut_is_illegal() -> None:
    composer = new_composer(max_answer_bytes=5)
    composer.compose([d.Text(PIECE)])
    with pytest.raises(IllegalDelta):
        composer.compose([d.Finish()])


def test_text_counts_as_a_part_of_the_whole_answer() -> None:
    composer = new_composer(max_answer_bytes=500)
    last = compose_until_cut_off(composer, [[d.Text(PIECE)]] * 100)[-1]
    assert "max_answer_bytes" in last.response.error.message
