"""Items translated to Chat Completions and back keep their content and order."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.backends.base import Turn
from antiphon.backends.chat_completions.quirks import Quirks
from antiphon.backends.chat_completions.reader import ChatReader
from antiphon.backends.chat_completions.request import make_body
from antiphon.protocol import content, items
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.response import Usage
from support.replay import replay

LOSSLESS = Quirks(merge_system=False, replay_reasoning="always", thinking_tags=False)
# Texts begin with a letter, so that none is mere white space, which is no message.
words = st.text('ab<>/ \n"\\é漢🎈', max_size=8).map(lambda text: f"x{text}")
urls = st.integers(0, 10**6).map(lambda number: f"data:image/png;base64,{number}")
images = urls.map(lambda url: content.InputImage(image_url=url))
arguments = st.dictionaries(words, words, max_size=2).map(json.dumps)
parts = st.lists(words.map(content.InputText) | images, min_size=1, max_size=3)


@st.composite
def answers(draw: st.DrawFn, numbers: Iterator[int]) -> list[Any]:
    """Generate the items of one model answer, with the outputs of its calls in any order."""
    produced: list[Any] = [
        items.Reasoning(content=[content.ReasoningText(each)]) for each in draw(st.lists(words, max_size=2))
    ]
    groups = draw(st.lists(st.lists(words, min_size=1, max_size=2), max_size=2))
    produced += [items.Message("assistant", [content.OutputText(each) for each in texts]) for texts in groups]
    calls = [
        items.FunctionCall(f"call_{next(numbers)}", draw(st.sampled_from("fg")), draw(arguments))
        for _ in range(draw(st.integers(0, 3)))
    ]
    outputs = [items.FunctionCallOutput(draw(words | parts), each.call_id) for each in draw(st.permutations(calls))]
    return produced + calls + outputs


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    numbers = itertools.count()
    history: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        history += draw(st.lists(st.builds(items.Message, st.sampled_from(["developer", "user"]), words), max_size=2))
        history.append(items.Message("user", draw(parts)))
        history += draw(answers(numbers))
    return history


def echo(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an answer that repeats this message, one character in each chunk."""
    pieces: list[dict[str, Any]] = [{"reasoning_content": each} for each in message.get("reasoning_content") or ()]
    pieces += [{"content": each} for each in message["content"] or ()]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        pieces.append({"tool_calls": [{"index": index, "id": call["id"], "function": {"name": function["name"]}}]})
        pieces += [
            {"tool_calls": [{"index": index, "function": {"arguments": each}}]} for each in function["arguments"]
        ]
    chunks = [{"choices": [{"delta": piece}]} for piece in pieces] + [{"choices": [{"finish_reason": "stop"}]}]
    raw = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode()
    events = replay(lambda: ChatReader(LOSSLESS, estimate=lambda _: Usage(0, 0, 0)), [raw])
    output: list[dict[str, Any]] = events[-1]["response"]["output"]
    return output


def list_parts(parts: Any) -> list[tuple[str, ...]]:
    """Return the texts and images of a message of either API, in order."""
    if isinstance(parts, str):
        return [("text", parts)]
    atoms: list[tuple[str, ...]] = []
    for part in parts:
        if isinstance(part, content.InputImage):
            atoms.append(("image", part.image_url or ""))
        elif isinstance(part, dict) and part["type"] == "image_url":
            atoms.append(("image", part["image_url"]["url"]))
        else:
            atoms.append(("text", part["text"] if isinstance(part, dict) else part.text))
    return atoms


def list_history(history: list[Any]) -> list[tuple[str, ...]]:
    """Return the parts of a conversation that a translation must keep, as tuples."""
    outputs = {item.call_id: item for item in history if isinstance(item, items.FunctionCallOutput)}
    atoms: list[tuple[str, ...]] = []
    calls: list[items.FunctionCall] = []
    for item, following in zip(history, [*history[1:], None], strict=True):
        if isinstance(item, items.FunctionCall):
            atoms.append(("call", item.call_id, item.name, item.arguments))
            calls.append(item)
            if not isinstance(following, items.FunctionCall):
                atoms += _list_outputs([outputs[call.call_id] for call in calls])
                calls = []
        elif isinstance(item, items.Reasoning):
            atoms += [
                ("reasoning", part.text) for part in item.content or () if isinstance(part, content.ReasoningText)
            ]
        elif isinstance(item, items.Message) and item.role == "assistant":
            # The parts of one answer go on where the one before has ended.
            atoms.append(("assistant", "text", "".join(atom[1] for atom in list_parts(item.content))))
        elif isinstance(item, items.Message):
            atoms += [(item.role, *atom) for atom in list_parts(item.content)]
    return atoms


def _list_outputs(outputs: list[items.FunctionCallOutput]) -> list[tuple[str, ...]]:
    parts = [(output.call_id or "", list_parts(output.output)) for output in outputs]
    texts = [("output", call_id, "\n".join(atom[1] for atom in atoms if atom[0] == "text")) for call_id, atoms in parts]
    return [*texts, *(("user", *atom) for _, atoms in parts for atom in atoms if atom[0] == "image")]


def list_messages(messages: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    atoms: list[tuple[str, ...]] = []
    for message in messages:
        if message["role"] == "assistant":
            atoms += [_list_item(item) for item in echo(message)]
        elif message["role"] == "tool":
            produced = message["content"]
            elsewhere = produced == "The output follows in the next message."
            atoms.append(("output", message["tool_call_id"], "" if elsewhere else produced))
        else:
            role = "developer" if message["role"] == "system" else "user"
            atoms += [(role, *atom) for atom in list_parts(message["content"]) if not atom[1].startswith("[Output of")]
    return atoms


def _list_item(item: dict[str, Any]) -> tuple[str, ...]:
    if item["type"] == "function_call":
        return ("call", item["call_id"], item["name"], item["arguments"])
    (part,) = item["content"]
    return ("reasoning", part["text"]) if item["type"] == "reasoning" else ("assistant", "text", part["text"])


# Separators with which Chat Completions messages join consecutive texts.
JOINTS = {("user", "text"): "\n", ("assistant", "text"): "\n\n", ("reasoning",): "\n\n"}


def join_texts(atoms: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join the texts of a message without media, as the messages do."""
    joined: list[tuple[str, ...]] = []
    for atom in atoms:
        *kind, text = atom
        joint = JOINTS.get(tuple(kind))
        if joined and joint is not None and joined[-1][:-1] == tuple(kind):
            joined[-1] = (*kind, f"{joined[-1][-1]}{joint}{text}")
        else:
            joined.append(atom)
    return joined


@given(histories())
def test_history_round_trip_is_complete_and_ordered(history: list[Any]) -> None:
    messages = make_body(Turn(request=CreateRequest(), items=history), LOSSLESS)["messages"]
    assert join_texts(list_messages(messages)) == join_texts(list_history(history))


@given(histories())
def test_every_call_is_followed_by_its_outputs(history: list[Any]) -> None:
    messages = make_body(Turn(request=CreateRequest(), items=history), Quirks())["messages"]
    owed: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == owed.pop(0)
            continue
        assert owed == []
        owed = [call["id"] for call in message.get("tool_calls", ())]
    assert owed == []
    assert "system" not in [message["role"] for message in messages[1:]]
