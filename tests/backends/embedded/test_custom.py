"""Custom tools on the real model: whatever it says obeys the grammar, and arrives as it was said."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from antiphon.backends.base import Turn
from antiphon.backends.embedded.backend import EmbeddedBackend
from antiphon.backends.embedded.weights import find_weights
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The grammar that Codex CLI sends with its tool for patches.
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
SUMS = """
start: expr
expr: term (("+" | "-") term)*
term: INT | "(" expr ")"
%import common.INT
%ignore " "
"""
COLOR = {"type": "function", "name": "paint", "parameters": {"properties": {"color": {"enum": ["red", "blue"]}}}}


def custom(name: str, **form: Any) -> dict[str, Any]:
    tool = {"type": "custom", "name": name, "description": f"Use {name}"}
    return tool | ({"format": {"type": "grammar", **form}} if form else {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[EmbeddedBackend]:
    # With two slots, one remembers how the prompts begin while the other tries the grammars.
    backend = EmbeddedBackend(find_weights("smollm2-135m"), context=1024, slots=2, batch=256, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


async def ask(backend: EmbeddedBackend, input: str, **parameters: Any) -> list[Delta]:
    body = {"model": "smollm2-135m", "input": input, "temperature": 0, "max_output_tokens": 60, **parameters}
    request = codec.decode_request(json.dumps(body).encode()).request
    turn = Turn(request=request, items=[Message("user", input)])
    return [delta async for batch in await backend.stream(turn) for delta in batch]


def read_call(deltas: list[Delta]) -> tuple[str, str]:
    """The one call that was made."""
    calls = [delta for delta in deltas if isinstance(delta, CustomToolCall)]
    assert {call.key for call in calls} == {0}
    assert not any(isinstance(delta, Text | ToolCall) for delta in deltas)
    return "".join(call.name for call in calls), "".join(call.input for call in calls)


def matches(grammar: str, text: str, *, whole: bool) -> bool:
    """By a copy of the grammar's compiler that is not the model's. A text that was cut off is the beginning of one."""
    matcher = LLMatcher(LLTokenizer("byte"), f"%llguidance {{}}\n{grammar}")
    return bool(matcher.consume_tokens(list(text.encode()))) and (matcher.is_accepting() or not whole)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(GET|PUT) /[a-z]+/\d{1,3}",
        "[a-z]{2,8}\n[/]{3}",
        r"\\\/x{2}",
        "</tool_call>\n[0-9]{2}\n</tool_call>",
    ],
)
async def test_an_input_matches_its_regular_expression(backend: EmbeddedBackend, pattern: str) -> None:
    tool = custom("fetch", syntax="regex", definition=pattern)
    said = await ask(backend, "Fetch it.", tools=[tool], tool_choice="required", temperature=2)
    name, text = read_call(said)
    assert (name, said[-1]) == ("fetch", Finish("stop"))
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("grammar", "asked", "temperature"), [(PATCH, "Add the file hello.txt with one line.", 0), (SUMS, "2 and 2?", 2)]
)
async def test_an_input_matches_its_lark_grammar(
    backend: EmbeddedBackend, grammar: str, asked: str, temperature: float
) -> None:
    tool = custom("edit", syntax="lark", definition=grammar)
    choice = {"type": "custom", "name": "edit"}
    said = await ask(backend, asked, tools=[COLOR, tool], tool_choice=choice, temperature=temperature)
    name, text = read_call(said)
    assert name == "edit"
    assert matches(grammar, text, whole=said[-1] == Finish("stop"))


async def test_two_grammars_with_the_same_names_in_them_do_not_mix(backend: EmbeddedBackend) -> None:
    tools = [
        custom("small", syntax="lark", definition='start: word\nword: "a" LETTER\nLETTER: /[b-d]/'),
        custom("large", syntax="lark", definition='start: word\nword: "X" LETTER\nLETTER: /[YZ]/'),
    ]
    name, text = read_call(await ask(backend, "Go.", tools=tools, tool_choice="required"))
    assert re.fullmatch({"small": "a[b-d]", "large": "X[YZ]"}[name], text)


async def test_an_input_without_a_grammar_is_any_text_and_ends_at_the_closing_sign(backend: EmbeddedBackend) -> None:
    said = await ask(backend, "Write the word ok to the note.", tools=[custom("note")], tool_choice="required")
    calls = [delta for delta in said if isinstance(delta, CustomToolCall)]
    assert calls[0].name == "note"
    assert "</tool_call>" not in "".join(call.input for call in calls)


async def test_a_model_that_may_choose_answers_or_calls(backend: EmbeddedBackend) -> None:
    tools = [COLOR, custom("note"), custom("dice", syntax="regex", definition="d[468]")]
    said = await ask(backend, "Good morning!", tools=tools)
    kinds = {type(delta) for delta in said}
    assert kinds & {Text, ToolCall, CustomToolCall}
    assert Text not in kinds or not kinds & {ToolCall, CustomToolCall}


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", "a(?=b)b"),
        ("regex", "("),
        ("regex", r"(a)\1"),
        ("lark", "start: nowhere"),
        ("lark", 'begin: "a"'),
        ("lark", 'start: "a" }\nmore: %lark {\n'),
        ("lark", "no grammar at all"),
        ("lark", ""),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_by_its_place(
    backend: EmbeddedBackend, syntax: str, definition: str
) -> None:
    tools = [COLOR, custom("x", syntax="regex", definition="x"), custom("y", syntax=syntax, definition=definition)]
    with pytest.raises(InvalidRequest) as refusal:
        await ask(backend, "Hi", tools=tools)
    assert (refusal.value.param, refusal.value.code) == ("tools[2].format.definition", "unsupported_grammar")


async def test_a_grammar_nobody_may_use_is_not_looked_at(backend: EmbeddedBackend) -> None:
    tools = [custom("y", syntax="regex", definition="(")]
    said = await ask(backend, "Hi", tools=tools, tool_choice="none", max_output_tokens=4)
    assert any(isinstance(delta, Text) for delta in said)
