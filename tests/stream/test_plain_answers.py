"""A run that emits no events gets the same response as one that does."""

import itertools
from collections.abc import Sequence

import pytest

from antiphon.protocol.content import LogProb, OutputText
from antiphon.protocol.items import Message
from antiphon.protocol.response import Response, Usage
from antiphon.stream import deltas
from antiphon.stream.composer import Composer
from antiphon.stream.deltas import Delta, Finish, Text, TokenUsage
from antiphon.stream.limits import AnswerLimits

USAGE = TokenUsage(Usage(input_tokens=1, output_tokens=2, total_tokens=3))
SERVED = deltas.Served("small", "backend", "large")
TOKEN = LogProb("a", -0.1, [97], [])

PLAIN: list[Sequence[Delta]] = [
    (Text("Hello."), USAGE, Finish()),
    [Text(" \n"), USAGE, Finish("stop")],
    [SERVED, Text("Hello."), USAGE, Finish()],
]
OTHER: list[list[Sequence[Delta]]] = [
    [[Text(""), USAGE, Finish()]],
    [[Text("a", (TOKEN,)), USAGE, Finish()]],
    [[Text("a"), USAGE, Finish("length")]],
    [[Text("a"), Finish()]],
    [[Text("a"), Text("b"), USAGE, Finish()]],
    [[USAGE, Text("a"), Finish()]],
    [[deltas.Reasoning("a"), USAGE, Finish()]],
    [[deltas.ToolCall("a", "call_1", "f", "{}"), USAGE, Finish()]],
    [[Text("a")], [Text("b"), USAGE, Finish()]],
    [[deltas.Phase("commentary")], [Text("a"), USAGE, Finish()]],
    [[deltas.ToolCall("a", "call_1")], [Text("a"), USAGE, Finish()]],
    [[SERVED, SERVED, USAGE, Finish()]],
    [[Text("a"), USAGE, deltas.Failure("It failed.", "server_error")]],
    [[]],
]


def make_composer(limits: AnswerLimits | None = None) -> Composer:
    ids = itertools.count()
    response = Response(id="resp_1", created_at=0, model="small")
    composer = Composer(
        response, new_id=lambda prefix: f"{prefix}_{next(ids)}", now=lambda: 7, limits=limits or AnswerLimits()
    )
    composer.start()
    return composer


@pytest.mark.parametrize("batch", PLAIN)
def test_plain_answer_has_the_same_response_and_terminal_event(batch: Sequence[Delta]) -> None:
    emitting, silent = make_composer(), make_composer()
    events = emitting.compose(batch)
    assert silent.compose_silently(batch) == events[-1:]
    assert silent.response == emitting.response
    assert silent.finished
    assert silent.output == emitting.output
    assert silent.take_sequence_number() == emitting.take_sequence_number()


@pytest.mark.parametrize("batches", OTHER)
def test_other_answers_are_composed_in_full(batches: list[Sequence[Delta]]) -> None:
    emitting, silent = make_composer(), make_composer()
    for batch in batches:
        assert silent.compose_silently(batch) == emitting.compose(batch)
    assert silent.response == emitting.response


def test_limit_on_items_applies_to_a_plain_answer() -> None:
    limits = AnswerLimits(max_answer_items=0)
    emitting, silent = make_composer(limits), make_composer(limits)
    assert silent.compose_silently(PLAIN[0]) == emitting.compose(PLAIN[0])
    assert silent.response.status == "failed"


def test_failure_to_save_replaces_the_end_of_a_plain_answer() -> None:
    emitting, silent = make_composer(), make_composer()
    failure = deltas.Failure("The disk is full.", "store_full")
    events = emitting.replace_terminal(emitting.compose(PLAIN[0]), failure)
    assert silent.replace_terminal(silent.compose_silently(PLAIN[0]), failure) == events[-2:]
    assert silent.response == emitting.response
    part = OutputText("Hello.", [], [])
    assert silent.response.output == [Message("assistant", [part], "msg_0", "completed")]
