"""Partial typed output: the beginning of a JSON text, and the events of a stream."""

import dataclasses
import itertools
import json
from typing import Any

import pytest

from antiphon import Agent, PartialOutput
from antiphon.agent.partial_output import PartialJson, PartialReader
from antiphon.agent.typed_output import ObjectType
from support.scripted_model import ScriptedModel, call


@dataclasses.dataclass
class Song:
    title: str
    verses: list[str] = dataclasses.field(default_factory=list)


SONG = Song("Reveille", ["Wake up", "Get up"])
TEXT = '{"title": "Reveille", "verses": ["Wake up", "Get up"]}'


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("", ""),
        ("Here: ", ""),
        ("{", "{}"),
        ('{"a', "{}"),
        ('{"a":', "{}"),
        ('{"a": 1', "{}"),
        ('{"a": 1,', '{"a": 1}'),
        ('{"a": tru', "{}"),
        ('{"a": true ', '{"a": true}'),
        ('{"a": "b', '{"a": "b"}'),
        ('{"a": "b\\', '{"a": "b"}'),
        ('{"a": "b\\u00', '{"a": "b"}'),
        ('{"a": "\\ud83d\\ude', '{"a": ""}'),
        ('{"a": "\\ud83d\\ude00', '{"a": "\\ud83d\\ude00"}'),
        ('{"a": "\\"}', '{"a": "\\"}"}'),
        ('{"a": [1, {"b": [', '{"a": [1, {"b": []}]}'),
        ('{"a": ["x", ', '{"a": ["x"]}'),
        ('```json\n{"a": {}}\n```', '{"a": {}}'),
    ],
)
def test_beginning_of_a_text_is_completed(text: str, completed: str) -> None:
    for pieces in ([text], list(text)):
        partial = PartialJson()
        for piece in pieces:
            partial.feed(piece)
        assert partial.complete() == completed


def test_every_beginning_is_valid_and_grows_to_the_whole() -> None:
    value = {"a": [1.5, -2, None, {"b": 'q"\\ é 😀\n'}], "c": {"d": True, "e": []}, "f": "{[,:"}
    for text in (json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
        partial = PartialJson()
        for character in text:
            assert not partial.is_closed
            partial.feed(character)
            assert isinstance(json.loads(partial.complete()), dict)
        assert (partial.is_closed, json.loads(partial.complete())) == (True, value)


def test_brackets_are_closed_only_when_the_text_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = PartialJson._close
    monkeypatch.setattr(PartialJson, "_close", lambda partial: closed.append(close(partial)) or closed[-1])
    partial = PartialJson()
    partial.feed('{"a":' + "[" * 1000 + "]" * 999)
    assert partial.complete().endswith("[]" + "]" * 999 + "}")
    assert closed == ["]}"]


def test_number_in_many_pieces_is_scanned_once() -> None:
    partial = PartialJson()
    for piece in ('{"a": ', "1", "23", "4"):
        partial.feed(piece)
    assert (partial.complete(), partial._word_length) == ("{}", 10)
    partial.feed(', "b": 5}')
    assert (partial.complete(), partial.is_closed) == ('{"a": 1234, "b": 5}', True)


def test_long_text_is_parsed_a_limited_number_of_times() -> None:
    reader = PartialReader(ObjectType(Song, where="test"))
    deltas = ['{"title": "', *(["word "] * 20_000), '"}']
    read = [each for delta in deltas if (each := reader.feed(delta)) is not None]
    assert read[-1] == ({"title": "word " * 20_000}, Song("word " * 20_000))
    assert len(read) < 1_000


async def collect(agent: Agent[Any, Any], **options: Any) -> list[tuple[Any, Any]]:
    events = [event async for event in agent.run_stream("Go.", partial_output=True, **options)]
    assert events[-1].outcome.kind == "final"
    return [(event.data, event.output) for event in events if isinstance(event, PartialOutput)]


@pytest.mark.parametrize("mode", ["native", "prompt"])
async def test_stream_has_the_output_as_far_as_it_is_written(scripted: ScriptedModel, mode: Any) -> None:
    scripted.set_answers(TEXT)
    partial = await collect(scripted.agent(output_type=Song, output_mode=mode))
    assert partial[-1] == (dataclasses.asdict(SONG), SONG)
    assert len(partial) > 2
    for (shorter, _), (longer, output) in itertools.pairwise(partial):
        assert longer["title"].startswith(shorter.get("title", ""))
        assert output is None or output.title == longer["title"]
    assert any(output is not None and not output.verses for _, output in partial)


async def test_output_that_does_not_match_yet_has_no_value(in_process: ScriptedModel) -> None:
    in_process.set_answers([{"text": '{"value": [1, 2'}, {"text": ', "x'}, {"text": '"]}'}], '{"value": [1, 2]}')
    partial = await collect(in_process.agent(output_type=list[int]))
    assert ([1, 2, "x"], None) in partial
    # The model was asked again.
    assert partial[-1] == ([1, 2], [1, 2])


async def test_arguments_of_an_output_tool_are_partial_output(in_process: ScriptedModel) -> None:
    in_process.set_answers([call("final_answer", json.loads(TEXT))])
    partial = await collect(in_process.agent(output_type=Song, output_mode="tool"))
    assert partial[-1] == (dataclasses.asdict(SONG), SONG)


async def test_agent_of_a_handoff_has_its_own_output_type(in_process: ScriptedModel) -> None:
    singer = in_process.agent(name="singer", output_type=Song)
    in_process.set_answers([call("transfer_to_singer", {})], TEXT)
    partial = await collect(in_process.agent(handoffs=[singer]))
    assert partial[-1] == (dataclasses.asdict(SONG), SONG)


async def test_stream_without_the_option_has_no_partial_output(in_process: ScriptedModel) -> None:
    in_process.set_answers(TEXT)
    events = [event async for event in in_process.agent(output_type=Song).run_stream("Go.")]
    assert not any(isinstance(event, PartialOutput) for event in events)
