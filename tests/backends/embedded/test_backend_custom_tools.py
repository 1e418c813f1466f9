"""Custom tools on llama.cpp: the output follows the grammar and arrives unchanged."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from antiphon.backends.base import Turn
from antiphon.backends.embedded.backend import EmbeddedBackend
from antiphon.errors import InvalidRequest
from antiphon.protocol import codec
from antiphon.protocol.items import Message
from antiphon.stream.deltas import CustomToolCall, Delta, Finish, Text, ToolCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The grammar of Codex CLI's patch tool.
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
async def backend(shallow_weights: Path) -> AsyncIterator[EmbeddedBackend]:
    # With two slots, one caches the start of the prompts while the other tests the grammars.
    backend = EmbeddedBackend(shallow_weights, context=1024, slots=2, batch=256, tool_examples=False)
    await backend.start()
    yield backend
    await backend.close()


async def generate(backend: EmbeddedBackend, input: str, **parameters: Any) -> list[Delta]:
    body = {"model": "smollm2-135m", "input": input, "temperature": 0, "max_output_tokens": 60, **parameters}
    request = codec.decode_request(json.dumps(body).encode()).body
    turn = Turn(request=request, items=[Message("user", input)])
    return [delta async for batch in await backend.stream(turn) for delta in batch]


def read_call(deltas: list[Delta]) -> tuple[str, str]:
    """Return the name and input of the only call."""
    calls = [delta for delta in deltas if isinstance(delta, CustomToolCall)]
    assert {call.key for call in calls} == {0}
    assert not any(isinstance(delta, Text | ToolCall) for delta in deltas)
    return "".join(call.name for call in calls), "".join(call.input for call in calls)


def matches(grammar: str, text: str, *, whole: bool) -> bool:
    """Return True if the text matches, or starts a match unless `whole`. Uses a separate grammar compiler."""
    matcher = LLMatcher(LLTokenizer("byte"), f"%llguidance {{}}\n{grammar}")
    return bool(matcher.consume_tokens(list(text.encode()))) and (matcher.is_accepting() or not whole)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(GET|PUT) /[a-z]{1,9}/\d{1,3}",
        "[a-z]{2,8}\n[/]{3}",
        r"\\\/x{2}",
        "</tool_call>\n[0-9]{2}\n</tool_call>",
    ],
)
async def test_input_matches_its_regular_expression(backend: EmbeddedBackend, pattern: str) -> None:
    tool = custom("fetch", syntax="regex", definition=pattern)
    deltas = await generate(backend, "Fetch it.", tools=[tool], tool_choice="required", temperature=2)
    name, text = read_call(deltas)
    assert (name, deltas[-1]) == ("fetch", Finish("stop"))
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("grammar", "prompt", "temperature"), [(PATCH, "Add the file hello.txt with one line.", 0), (SUMS, "2 and 2?", 2)]
)
async def test_input_matches_its_lark_grammar(
    backend: EmbeddedBackend, grammar: str, prompt: str, temperature: float
) -> None:
    tool = custom("edit", syntax="lark", definition=grammar)
    choice = {"type": "custom", "name": "edit"}
    deltas = await generate(backend, prompt, tools=[COLOR, tool], tool_choice=choice, temperature=temperature)
    name, text = read_call(deltas)
    assert name == "edit"
    assert matches(grammar, text, whole=deltas[-1] == Finish("stop"))


async def test_grammars_with_equal_rule_names_do_not_mix(backend: EmbeddedBackend) -> None:
    tools = [
        custom("small", syntax="lark", definition='start: word\nword: "a" LETTER\nLETTER: /[b-d]/'),
        custom("large", syntax="lark", definition='start: word\nword: "X" LETTER\nLETTER: /[YZ]/'),
    ]
    name, text = read_call(await generate(backend, "Go.", tools=tools, tool_choice="required"))
    assert re.fullmatch({"small": "a[b-d]", "large": "X[YZ]"}[name], text)


async def test_free_text_input_ends_at_the_end_marker(backend: EmbeddedBackend) -> None:
    deltas = await generate(backend, "Write the word ok to the note.", tools=[custom("note")], tool_choice="required")
    calls = [delta for delta in deltas if isinstance(delta, CustomToolCall)]
    assert calls[0].name == "note"
    assert "</tool_call>" not in "".join(call.input for call in calls)


async def test_model_answers_or_calls_with_auto_choice(backend: EmbeddedBackend) -> None:
    tools = [COLOR, custom("note"), custom("dice", syntax="regex", definition="d[468]")]
    deltas = await generate(backend, "Good morning!", tools=tools)
    kinds = {type(delta) for delta in deltas}
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
        ("lark", 'start: b~1000\nb: c~1000\nc: d~1000\nd: "a"~1000'),
        ("lark", 'start: ("x" | "y") b~100\nb: c~100\nc: d~100\nd: "a"~100'),
    ],
)
async def test_invalid_grammar_is_rejected_with_param_path(
    backend: EmbeddedBackend, syntax: str, definition: str
) -> None:
    tools = [COLOR, custom("x", syntax="regex", definition="x"), custom("y", syntax=syntax, definition=definition)]
    with pytest.raises(InvalidRequest) as caught:
        await generate(backend, "Hi", tools=tools)
    assert (caught.value.param, caught.value.code) == ("tools[2].format.definition", "unsupported_grammar")


async def test_grammar_of_uncallable_tool_is_not_compiled(backend: EmbeddedBackend) -> None:
    tools = [custom("y", syntax="regex", definition="(")]
    deltas = await generate(backend, "Hi", tools=tools, tool_choice="none", max_output_tokens=4)
    assert any(isinstance(delta, Text) for delta in deltas)
