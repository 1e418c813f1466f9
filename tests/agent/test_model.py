"""A turn of the model, as the loop reads it: whatever servers make of the form."""

import json
from typing import Any

import pytest

from antiphon import Agent
from antiphon.agent.model import Answer, Spoken, hear, make_answer
from antiphon.ledger import Ledger
from antiphon.protocol import codec
from antiphon.protocol.response import InputTokensDetails, OutputTokensDetails, Usage

NONE = Usage(0, 0, 0)
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


WHOLE_DELTA = (
    b'{"type":"response.output_text.delta","delta":"a","item_id":"i","output_index":0,"content_index":0,'
    b'"sequence_number":1,"logprobs":[]}'
)


def call(call_id: str | None = "call_1", **fields: Any) -> dict[str, Any]:
    named = {"call_id": call_id} if call_id is not None else {}
    return {"type": "function_call", "name": "look_up", "arguments": "{}"} | named | fields


def cut(*output: Any) -> dict[str, Any]:
    return {"id": "r", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": output}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ({"id": "r", "output": [{"id": "m", "status": "completed"} | SAID]}, Answer("r", [SAID], NONE)),
        ({"output": [SAID]}, Answer("", [SAID], NONE)),
        (cut(SAID), Answer("r", [SAID], NONE, "max_output_tokens")),
        ({"id": "r", "status": "incomplete", "output": [SAID]}, Answer("r", [SAID], NONE, "incomplete")),
        # What follows is not what the server has stored: it cannot be continued from there.
        (cut(SAID, call(arguments='{"ci')), Answer("r", [SAID], NONE, "max_output_tokens", False)),
        (cut(SAID, THOUGHT, call(status="incomplete")), Answer("r", [SAID], NONE, "max_output_tokens", False)),
        (cut(call(), THOUGHT), Answer("r", [call()], NONE, "max_output_tokens", False)),
        ({"id": "r", "output": [call(), call()]}, Answer("r", [call(), call("call_1_2")], NONE, "", False)),
        ({"id": "r", "output": [call(None)]}, Answer("r", [call("call_1")], NONE, "", False)),
        ({"id": "r", "output": ["nonsense", SAID]}, Answer("r", [SAID], NONE)),
    ],
)
def test_the_answer_can_be_sent_back(response: dict[str, Any], answer: Answer) -> None:
    assert make_answer(response) == answer


def test_arguments_that_are_no_json_are_the_models_mistake_unless_it_was_cut_off() -> None:
    assert make_answer({"id": "r", "output": [call(arguments="{")]}).output == [call(arguments="{")]


@pytest.mark.parametrize(
    ("told", "read"),
    [
        (None, NONE),
        ("many", NONE),
        ({"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}, Usage(3, 2, 5)),
        ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2, 5)),
        ({"input_tokens": 3, "output_tokens": None, "input_tokens_details": None}, Usage(3, 0, 3)),
        (
            {
                "input_tokens": 3,
                "output_tokens": 2,
                "total_tokens": 9,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(3, 2, 9, InputTokensDetails(1), OutputTokensDetails(2)),
        ),
    ],
)
def test_usage_is_read_whatever_is_missing(told: Any, read: Usage) -> None:
    assert make_answer({"output": [], "usage": told}).usage == read


@pytest.mark.parametrize(
    ("event", "spoken"),
    [
        (b'{"type":"response.output_text.delta","delta":"a"}', Spoken("text", "a")),
        (WHOLE_DELTA, Spoken("text", "a")),
        (b'{"type":"response.reasoning_summary_text.delta","delta":"a"}', Spoken("reasoning", "a")),
        (b'{"type":"response.function_call_arguments.delta","delta":"a"}', None),
        (b'{"type":"keepalive"}', None),
    ],
)
def test_what_is_said_is_heard_in_any_form(event: bytes, spoken: Spoken | None) -> None:
    assert hear(codec.decode_event(event)) == spoken


class Broken:
    """A transport that does not do what it should."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    async def stream(self, request: dict[str, Any]) -> Any:
        return self._tell()

    async def _tell(self) -> Any:
        for batch in self._batches:
            if isinstance(batch, Exception):
                raise batch
            yield [codec.decode_event(json.dumps(event).encode()) for event in batch]

    async def close(self) -> None:
        """There is nothing to release."""


@pytest.mark.parametrize("batches", [[KeyError("x")], [[], RecursionError()], [["text"]], [[7]]])
async def test_whatever_a_transport_does_is_how_the_run_ends_and_not_an_exception(batches: Any, ledger: Ledger) -> None:
    agent = Agent(model="m", transport=Broken(*batches))
    outcome = await agent.run("Go.", durable=ledger)
    assert outcome.error is not None
    assert (outcome.kind, outcome.turns) == ("failed", 0)
    assert [run.status for run in await ledger.runs()] == ["failed"]


@pytest.mark.parametrize("content", [5, {"text": "a"}, ["a", None, 7], [{"type": "output_text", "text": 5}]])
async def test_content_that_makes_no_sense_leaves_a_run_that_can_be_read(content: Any, ledger: Ledger) -> None:
    said = {"type": "message", "role": "assistant", "content": content}
    ended = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [said]}}
    agent = Agent(model="m", transport=Broken([ended]))
    outcome = await agent.run("Go.", durable=ledger, run_id="run_1")
    assert outcome.kind in ("final", "no_progress")
    assert (await agent.resume("run_1", durable=ledger)).kind == outcome.kind
