"""Events of a run: their time and ids, the arguments of calls, and the events of subagents."""

import json
import time

import msgspec
import pytest

from antiphon.agent.model_answer import ArgumentsReader, CallDelta
from antiphon.agent.outcome import (
    ArgumentsDelta,
    ModelEvent,
    RunEnded,
    RunEvent,
    SubagentEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnFinished,
    TurnStarted,
)
from antiphon.ledger import Ledger
from antiphon.protocol import codec
from antiphon.protocol.json_text import JsonObject
from support.scripted_model import ScriptedModel, call, look_up

LOOK = call("look_up", {"city": "Bern"})


async def test_every_event_has_a_time_and_the_ids_of_its_run(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], "Mild.")
    started = time.time()
    events = [event async for event in scripted.agent(tools=[look_up]).run_stream("Go.", run_id="run_1")]
    times = [event.timestamp for event in events]
    assert started <= times[0]
    assert times[-1] <= time.time()
    assert times == sorted(times)
    assert {(event.run_id, event.parent_id) for event in events} == {("run_1", None)}


async def test_arguments_of_a_call_are_streamed(in_process: ScriptedModel) -> None:
    in_process.set_answers([LOOK, call("look_up", {"city": "Chur"}, "call_2")], "Mild.")
    received: dict[tuple[str, str], str] = {}
    async for event in in_process.agent(tools=[look_up]).run_stream("Go."):
        if isinstance(event, ArgumentsDelta):
            key = event.call_id, event.name
            received[key] = received.get(key, "") + event.text
    assert received == {("call_1", "look_up"): '{"city":"Bern"}', ("call_2", "look_up"): '{"city":"Chur"}'}


CALL = {"type": "function_call", "call_id": "call_1", "name": "look_up"}
ADDED = {"type": "response.output_item.added", "output_index": 2}
DELTA = {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "{"}


@pytest.mark.parametrize(
    "added",
    [
        ADDED | {"sequence_number": 1, "item": CALL | {"id": "fc_1", "arguments": ""}},
        ADDED | {"sequence_number": 1, "item": CALL | {"id": "fc_1", "arguments": "", "new": 1}},
        ADDED | {"sequence_number": 1, "item": CALL},
        ADDED | {"item": CALL},
    ],
)
@pytest.mark.parametrize("delta", [DELTA, DELTA | {"sequence_number": 2, "item_id": "fc_1"}])
def test_arguments_are_read_from_incomplete_events(added: JsonObject, delta: JsonObject) -> None:
    reader = ArgumentsReader()
    assert reader.read(codec.decode_event(msgspec.json.encode(added))) is None
    assert reader.read(codec.decode_event(msgspec.json.encode(delta))) == CallDelta("call_1", "look_up", "{")


async def test_raw_events_of_the_server_are_streamed_on_request(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], "Mild.")
    agent = scripted.agent(tools=[look_up])
    events = [event async for event in agent.run_stream("Go.", raw_events=True)]
    raw = [event.event.type for event in events if isinstance(event, ModelEvent)]
    assert raw.count("response.completed") == 2
    assert raw.count("response.output_item.done") == 2
    deltas = [event.event for event in events if isinstance(event, ModelEvent) and "text.delta" in event.event.type]
    texts = [json.loads(codec.encode(event))["delta"] for event in deltas]
    assert texts == [event.text for event in events if isinstance(event, TextDelta)]
    assert not any(isinstance(event, ModelEvent) for event in [each async for each in agent.run_stream("Go.")])


async def test_events_of_a_subagent_are_nested(scripted: ScriptedModel) -> None:
    hooked: list[RunEvent] = []
    scripted.set_answers([call("ask", {"input": "How?"}, "call_a")], [LOOK], "Mild.", "It is mild.")
    helper = scripted.agent(name="helper", tools=[look_up], hooks=[hooked.append])
    agent = scripted.agent(tools=[helper.as_tool("ask", "Ask the helper.")])
    events = [event async for event in agent.run_stream("Go.", run_id="run_1")]
    (started,) = [event for event in events if isinstance(event, ToolStarted)]
    nested = [event for event in events if isinstance(event, SubagentEvent)]
    assert {(event.run_id, event.parent_id, event.call_id) for event in nested} == {("run_1", None, "call_a")}
    inner = [event.event for event in nested]
    assert inner == hooked
    assert {(event.run_id, event.parent_id) for event in inner} == {(started.idempotency_key, "run_1")}
    kinds = [type(event) for event in inner if not isinstance(event, TextDelta | ArgumentsDelta)]
    assert kinds == [TurnStarted, TurnFinished, ToolStarted, ToolFinished, TurnStarted, TurnFinished, RunEnded]
    assert "".join(event.text for event in inner if isinstance(event, TextDelta)) == "Mild."
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "It is mild."


async def test_events_of_a_resumed_subagent_have_the_same_ids(in_process: ScriptedModel, ledger: Ledger) -> None:
    in_process.set_answers([call("ask", {"input": "How?"}, "call_a")], [call("pay")], "Paid.", "It is paid.")

    helper = in_process.agent(name="helper", tools=[msgspec.structs.replace(look_up, name="pay", needs_approval=True)])
    agent = in_process.agent(tools=[helper.as_tool("ask", "Ask the helper.")])
    paused = await agent.run("Go.", ledger=ledger, run_id="run_1")
    approvals = {each.call_id: "No." for each in paused.pending}
    events = [event async for event in agent.resume_stream("run_1", approvals=approvals, ledger=ledger)]
    ids = {(event.event.run_id, event.event.parent_id) for event in events if isinstance(event, SubagentEvent)}
    assert ids == {("run_1:1:0", "run_1")}
    assert isinstance(events[-1], RunEnded)
