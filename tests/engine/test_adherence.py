"""An answer that must fit a schema is told as it comes, and fails at its end if it does not fit."""

from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.backends.base import Deltas
from antiphon.engine.adherence import find_strict, hold_to
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat, TextConfig
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import (
    CloseItem,
    Delta,
    Failure,
    Finish,
    Phase,
    Reasoning,
    Refusal,
    Served,
    Text,
    Tokens,
    ToolCall,
)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
STRICT = JsonSchemaFormat("n", schema=SCHEMA, strict=True)
GOOD = Text('{"n": 4}')
PROSE = Text("Sure! It is 4.")
CALL = ToolCall(0, "{}", "f", "call_1")
SPENT = Tokens(Usage(1, 2, 3))


async def tell(batches: Sequence[Sequence[Delta]]) -> Deltas:
    for batch in batches:
        yield batch


async def hold(*said: Delta, form: JsonSchemaFormat = STRICT) -> list[Delta]:
    return [delta async for batch in hold_to(form, tell([[each] for each in said])) for delta in batch]


@pytest.mark.parametrize(
    "said",
    [
        [GOOD, SPENT, Finish()],
        [Served("m", "up", "n"), Reasoning("Hm."), Text('{"n"'), SPENT, Text(": 4}"), CloseItem(), Finish()],
        [PROSE, CloseItem(), GOOD, Finish()],
        [PROSE, CALL, Finish()],
        [GOOD, CALL, Finish()],
        [Phase("commentary"), PROSE, CloseItem(), Finish()],
        [Phase("commentary"), PROSE, CloseItem(), Phase("final_answer"), GOOD, CloseItem(), Finish()],
        [Refusal("No."), Finish()],
        [PROSE, Finish("length")],
        [PROSE, Finish("content_filter")],
        [PROSE, Failure("No.")],
        [Finish()],
    ],
)
async def test_what_fits_or_is_no_answer_passes_as_it_is(said: list[Delta]) -> None:
    assert await hold(*said) == said


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ([PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ([Text('{"n": "4"}')], "$.n: '4' is not of type 'integer'"),
        ([Text('```json\n{"n": 4}\n```')], "the JSON stands in a code fence"),
        ([CALL, PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ([GOOD, CloseItem(), PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
async def test_what_does_not_fit_has_failed_after_all_was_told(said: list[Delta], fault: str) -> None:
    message = f"The model's server did not hold it to the schema, and its answer does not fit: {fault}"
    assert await hold(*said, SPENT, Finish()) == [*said, SPENT, Failure(message, "invalid_output", "model_error")]


@pytest.mark.parametrize("schema", [{"type": 5}, {"$ref": "#/$defs/none"}])
async def test_a_schema_that_cannot_be_checked_is_no_fault_of_the_answer(schema: dict[str, Any]) -> None:
    assert await hold(GOOD, Finish(), form=JsonSchemaFormat("n", schema=schema, strict=True)) == [GOOD, Finish()]


async def test_closing_it_closes_the_answer() -> None:
    answer = tell([[PROSE], [Finish()]])
    held = hold_to(STRICT, answer)
    await anext(held)
    await held.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (STRICT, STRICT),
        (JsonSchemaFormat("n", schema=SCHEMA), None),
        (JsonSchemaFormat("n", schema=SCHEMA, strict=False), None),
        (JsonObjectFormat(), None),
        (None, None),
    ],
)
def test_only_a_strict_schema_must_be_fitted(form: Any, found: Any) -> None:
    assert find_strict(CreateRequest(model="m", text=TextConfig(format=form))) == found
    assert find_strict(CreateRequest(model="m")) is None
