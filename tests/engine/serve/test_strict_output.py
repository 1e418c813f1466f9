"""Strict output: a misfit fails at the end of a stream, and is retried once without a stream."""

from collections.abc import Sequence
from typing import Any

import pytest

from antiphon.backends.base import Capabilities, Model, Turn
from antiphon.engine.serve.strict_output import StrictOutput, check_at_end, find_strict_schema
from antiphon.errors import UpstreamError
from antiphon.protocol import codec
from antiphon.protocol.content import LogProb
from antiphon.protocol.items import Message
from antiphon.protocol.request import CreateRequest, JsonObjectFormat, JsonSchemaFormat, TextConfig
from antiphon.protocol.response import Usage
from antiphon.stream.deltas import (
    CloseItem,
    Delta,
    Deltas,
    Failure,
    Finish,
    Phase,
    Reasoning,
    Refusal,
    Served,
    Text,
    TokenUsage,
    ToolCall,
)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
STRICT = JsonSchemaFormat("n", schema=SCHEMA, strict=True)
GOOD = Text('{"n": 4}')
PROSE = Text("Sure! It is 4.")
CALL = ToolCall(0, "{}", "f", "call_1")
SPENT = TokenUsage(Usage(1, 2, 3))
OPEN = TokenUsage(SPENT.usage, is_open=True)


async def emit(batches: Sequence[Sequence[Delta]]) -> Deltas:
    for batch in batches:
        yield batch


async def watch(*produced: Delta, form: JsonSchemaFormat = STRICT) -> list[Delta]:
    return [delta async for batch in check_at_end(form, emit([[each] for each in produced])) for delta in batch]


@pytest.mark.parametrize(
    "produced",
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
async def test_fitting_or_other_output_passes_unchanged(produced: list[Delta]) -> None:
    assert await watch(*produced) == produced


@pytest.mark.parametrize(
    ("produced", "fault"),
    [
        ([PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ([Text('{"n": "4"}')], "$.n: '4' is not of type 'integer'"),
        ([Text('```json\n{"n": 4}\n```')], "the JSON stands in a code fence"),
        ([CALL, PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ([GOOD, CloseItem(), PROSE], "not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
async def test_streamed_misfit_fails_after_all_deltas(produced: list[Delta], fault: str) -> None:
    message = f"The upstream did not enforce the schema, and the answer does not fit it: {fault}"
    assert await watch(*produced, SPENT, Finish()) == [
        *produced,
        SPENT,
        Failure(message, "invalid_output", "model_error"),
    ]


@pytest.mark.parametrize("schema", [{"type": 5}, {"$ref": "#/$defs/none"}])
async def test_uncheckable_schema_does_not_fail_answer(schema: dict[str, Any]) -> None:
    assert await watch(GOOD, Finish(), form=JsonSchemaFormat("n", schema=schema, strict=True)) == [GOOD, Finish()]


async def test_closing_check_closes_answer() -> None:
    answer = emit([[PROSE], [Finish()]])
    held = check_at_end(STRICT, answer)
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
def test_only_strict_schema_is_checked(form: Any, found: Any) -> None:
    assert find_strict_schema(CreateRequest(model="m", text=TextConfig(format=form))) == found
    assert find_strict_schema(CreateRequest(model="m")) is None


class Server:
    """A backend with fixed answers whose schema support is only a promise."""

    def __init__(self, *answers: Sequence[Delta | Exception], on_trust: bool = True) -> None:
        self.capabilities = Capabilities(json_schema=True, verify_json_schema=on_trust)
        self.turns: list[Turn] = []
        self._answers = iter(answers)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def models(self) -> Sequence[Model]:
        return []

    async def count_tokens(self, turn: Turn) -> int:
        return 0

    async def stream(self, turn: Turn) -> Deltas:
        self.turns.append(turn)
        return self._say(next(self._answers))

    async def _say(self, answer: Sequence[Delta | Exception]) -> Deltas:
        for each in answer:
            if isinstance(each, Exception):
                raise each
            yield [each]


async def ask(server: Server, *, streamed: bool = False, **fields: Any) -> list[Delta]:
    turn = Turn(
        request=CreateRequest(model="m", text=TextConfig(format=STRICT), **fields),
        items=[Message("user", "2+2?")],
        streamed=streamed,
    )
    answer = await StrictOutput(server).stream(turn)
    return [delta async for batch in answer for delta in batch]


SERVED = Served("m", "up", "n")
MISFIT = "The upstream did not enforce the schema, and the answer does not fit it: "
NOT_JSON = "not valid JSON: Expecting value: line 1 column 1 (char 0)"
FAILED = Failure(MISFIT + NOT_JSON, "invalid_output", "model_error")


async def test_unstreamed_misfit_is_hidden_and_retried_once() -> None:
    server = Server(
        [SERVED, Reasoning("Hm."), PROSE, SPENT, Finish()],
        [SERVED, Phase("final_answer"), GOOD, CloseItem(), SPENT, Finish()],
    )
    twice = TokenUsage(Usage(2, 4, 6))
    assert await ask(server, max_output_tokens=10) == [
        *(SERVED, OPEN),
        *(SERVED, Phase("final_answer"), GOOD, CloseItem(), twice, Finish()),
    ]
    first, second = server.turns
    assert (first.request.max_output_tokens, second.request.max_output_tokens) == (10, 8)
    assert second.request.text == first.request.text
    _, reasoning, produced, wish = (codec.encode(item).decode() for item in second.items)
    assert "Hm." in reasoning
    assert PROSE.text in produced
    assert f"This answer is not what was asked for: {NOT_JSON}. Answer again, with nothing but the JSON." in wish


async def test_second_misfit_fails_without_text() -> None:
    server = Server([SERVED, PROSE, SPENT, Finish()], [SERVED, PROSE, SPENT, Finish()])
    assert await ask(server) == [SERVED, OPEN, SERVED, TokenUsage(Usage(2, 4, 6)), FAILED]


@pytest.mark.parametrize(
    "produced",
    [
        [Text('{"n": 4}', (LogProb("4", -0.1, [52]),)), SPENT, Finish()],
        [Phase("commentary"), PROSE, CloseItem(), Phase("final_answer"), GOOD, CloseItem(), Finish()],
        [PROSE, Finish("length")],
        [PROSE, Failure("No.")],
        [Refusal("No."), Finish()],
        [],
    ],
)
async def test_unstreamed_fitting_answer_is_emitted_when_complete(produced: list[Delta]) -> None:
    server = Server(produced)
    assert (await ask(server), len(server.turns)) == (produced, 1)


async def test_unstreamed_code_fence_is_removed() -> None:
    fenced: list[Delta] = [Text("```json\n"), SPENT, Text('{"n": 4}'), Text("\n```"), CloseItem(), Finish()]
    server = Server([Reasoning("Hm."), *fenced])
    assert (await ask(server), len(server.turns)) == ([Reasoning("Hm."), GOOD, SPENT, CloseItem(), Finish()], 1)


async def test_answer_with_tool_call_is_not_retried() -> None:
    server = Server([CALL, PROSE, Finish()])
    assert (await ask(server), len(server.turns)) == ([CALL, PROSE, FAILED], 1)


async def test_streamed_answer_is_not_retried() -> None:
    server = Server([PROSE, Finish()])
    assert (await ask(server, streamed=True), len(server.turns)) == ([PROSE, FAILED], 1)


async def test_backend_with_enforced_schema_is_not_checked() -> None:
    server = Server([PROSE, Finish()], on_trust=False)
    assert (await ask(server), len(server.turns)) == ([PROSE, Finish()], 1)


async def test_deltas_before_upstream_error_are_emitted_first() -> None:
    server = Server([GOOD, UpstreamError("Gone.")])
    turn = Turn(request=CreateRequest(model="m", text=TextConfig(format=STRICT)), items=[], streamed=False)
    answer = await StrictOutput(server).stream(turn)
    assert await anext(answer) == [GOOD]
    with pytest.raises(UpstreamError, match="Gone"):
        await anext(answer)
