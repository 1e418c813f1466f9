"""The agent loop, on each transport."""

import asyncio
import gc
import json
from typing import Any

import pytest
from msgspec.structs import replace

from antiphon import Limits, Prices, tool
from antiphon.agent import loop
from antiphon.agent.budget import StopTimer
from antiphon.agent.loop_guard import STOPPED, WARNING
from antiphon.agent.outcome import (
    ArgumentsDelta,
    Notice,
    Outcome,
    RunEnded,
    RunEvent,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnFinished,
    TurnRestarted,
    TurnStarted,
)
from antiphon.agent.resume import INTERRUPTED
from antiphon.agent.steps import WRAP_UP
from antiphon.agent.tool_calls import CANCELLED, LIMIT_REACHED
from antiphon.tools.base import Tool, ToolContext, ToolInvocation
from support.scripted_model import DROP, HOLD, ScriptedModel, call, outputs_of, usage


@tool
async def look_up(city: str) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "celsius": len(city)}


LOOK = call("look_up", {"city": "Bern"})


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


async def watch(events: Any) -> tuple[list[RunEvent], Outcome]:
    events = [event async for event in events]
    assert isinstance(events[-1], RunEnded)
    return events, events[-1].outcome


# Turns and calls


async def test_run_without_tools_ends_with_the_answer(scripted: ScriptedModel) -> None:
    scripted.set_answers("It is mild.")
    outcome = await scripted.agent(instructions="Be brief.").run("How is it?")
    assert (outcome.kind, outcome.output, outcome.text, outcome.turns, outcome.state) == (
        "final",
        "It is mild.",
        "It is mild.",
        1,
        None,
    )
    assert scripted.sent == [
        {
            "model": "scripted",
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "How is it?"}],
            "include": ["reasoning.encrypted_content"],
            "store": False,
        }
    ]


async def test_tool_output_is_sent_in_the_next_turn(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": "Let me see."}, LOOK], "It is mild.")
    outcome = await scripted.agent(tools=[look_up]).run("How is it?")
    assert (outcome.kind, outcome.text, outcome.turns, outcome.tool_calls) == ("final", "It is mild.", 2, 1)
    _, request = scripted.sent
    assert request["tools"] == [look_up.describe()]
    assert [item.get("type", "message") for item in request["input"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert outputs_of(request) == [("call_1", '{"city":"Bern","celsius":4}')]
    assert not any("id" in item or "status" in item for item in request["input"])


async def test_calls_of_a_turn_run_concurrently_with_ordered_outputs(scripted: ScriptedModel) -> None:
    arrived, order = asyncio.Event(), []

    @tool
    async def slow(name: str) -> str:
        """Wait for the other."""
        await arrived.wait()
        order.append(name)
        return name

    @tool
    async def quick(name: str) -> str:
        """Let the other go."""
        order.append(name)
        arrived.set()
        return name

    scripted.set_answers([call("slow", {"name": "a"}, "call_a"), call("quick", {"name": "b"}, "call_b")], "Done.")
    await scripted.agent(tools=[slow, quick]).run("Go.")
    assert order == ["b", "a"]
    assert outputs_of(scripted.sent[1]) == [("call_a", "a"), ("call_b", "b")]


async def test_events_are_complete_and_in_order(scripted: ScriptedModel) -> None:
    @tool
    async def work(context: ToolContext) -> str:
        """Work."""
        context.report("half way")
        context.report("caf\udce9")
        return "done"

    scripted.set_answers([call("work")], "All is done.")
    events, outcome = await watch(scripted.agent(tools=[work]).run_stream("Go.", run_id="run_x"))
    made = ToolInvocation("call_1", "work", "{}")
    # Not every server streams the arguments of calls.
    events = [event for event in events if not isinstance(event, ArgumentsDelta)]
    assert [type(event) for event in events] == [
        TurnStarted,
        TurnFinished,
        ToolStarted,
        ToolProgress,
        ToolProgress,
        ToolFinished,
        TurnStarted,
        *[TextDelta] * 3,
        TurnFinished,
        RunEnded,
    ]
    assert [replace(event, timestamp=0) for event in (events[0], *events[2:6])] == [
        TurnStarted("run_x", 1, timestamp=0),
        ToolStarted("run_x", made, "run_x:1:0", timestamp=0),
        ToolProgress("run_x", "call_1", "half way", timestamp=0),
        ToolProgress("run_x", "call_1", "caf?", timestamp=0),
        ToolFinished("run_x", made, "done", False, timestamp=0),
    ]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == outcome.text == "All is done."


async def test_reasoning_is_sent_back_with_its_call(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"reasoning": "I should look."}, LOOK], "Mild.")
    await scripted.agent(tools=[look_up]).run("How is it?")
    kinds = [item.get("type", "message") for item in scripted.sent[1]["input"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]


# Errors in a turn


@tool
async def explode() -> str:
    """Go wrong."""
    raise ValueError("no fuse")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("lookup", {"city": "Bern"}), "There is no tool 'lookup'. There are: look_up, explode."),
        (call("look_up", '{"city": '), "The arguments are not valid JSON"),
        (call("look_up", "[" * 100_000), "The arguments are not valid JSON: JSON is nested too deeply"),
        (
            call("look_up", {"town": "Bern"}),
            "The arguments do not fit the schema: Object contains unknown field `town`",
        ),
        (call("explode"), "ValueError: no fuse"),
    ],
    ids=["unknown tool", "no JSON", "too deep", "other arguments", "raised"],
)
async def test_error_of_a_call_is_its_output(scripted: ScriptedModel, made: dict[str, Any], reason: str) -> None:
    scripted.set_answers([made], "I see.")
    outcome = await scripted.agent(tools=[look_up, explode]).run("Go.")
    ((_, output),) = outputs_of(scripted.sent[1])
    assert (outcome.kind, outcome.text) == ("final", "I see.")
    assert error_of(output).startswith(reason)


async def test_broken_turn_is_repeated_and_no_tool_runs_twice(scripted: ScriptedModel) -> None:
    calls = []

    @tool
    async def charge(amount: int) -> str:
        """Take money."""
        calls.append(amount)
        return "paid"

    scripted.set_answers([call("charge", {"amount": 5})], [{"text": "It is"}, DROP], "It is paid.")
    events, outcome = await watch(scripted.agent(tools=[charge]).run_stream("Pay."))
    assert (outcome.kind, outcome.text, outcome.turns, calls) == ("final", "It is paid.", 2, [5])
    kinds = [type(event) for event in events if isinstance(event, TurnStarted | TurnRestarted | TurnFinished)]
    assert kinds == [TurnStarted, TurnFinished, TurnStarted, TurnRestarted, TurnFinished]
    assert scripted.sent[1] == scripted.sent[2]


async def test_turn_that_always_breaks_fails_a_resumable_run(scripted: ScriptedModel) -> None:
    scripted.set_answers(*[[{"text": "It"}, DROP]] * 3, "It is mild.")
    agent = scripted.agent()
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.turns) == ("failed", 0)
    assert outcome.error is not None
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state)
    assert (resumed.kind, resumed.text, resumed.run_id) == ("final", "It is mild.", outcome.run_id)


async def test_rejected_request_fails_the_run_at_once(scripted: ScriptedModel) -> None:
    error = {"message": "No such thing.", "status": 400, "type": "invalid_request_error", "code": "bad", "param": None}
    scripted.set_answers([{"raise": error}])
    outcome = await scripted.agent().run("How is it?")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("bad", "No such thing.")
    assert len(scripted.sent) == 1


async def test_incomplete_answer_is_an_outcome_of_its_own(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": "It is mi"}, {"finish": "length"}])
    outcome = await scripted.agent().run("How is it?")
    assert (outcome.kind, outcome.text, outcome.output) == ("incomplete", "It is mi", "It is mi")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.raw) == ("max_output_tokens", "It is mi")


async def test_incomplete_call_is_not_run_but_the_others_are(scripted: ScriptedModel) -> None:
    torn = call("look_up", '{"city": "Ro', "call_2")
    scripted.set_answers([LOOK, {"reasoning": "And Rome."}, torn, {"finish": "length"}], "Mild.")
    outcome = await scripted.agent(tools=[look_up], conversation_state="server").run("How is it?")
    assert outcome.kind == "final"
    request = scripted.sent[1]
    # The stored response ends with an incomplete call, so it is not continued.
    assert "previous_response_id" not in request
    assert [item.get("call_id", item.get("role")) for item in request["input"]] == ["user", "call_1", "call_1"]


async def test_empty_turn_ends_the_run(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": " "}])
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.turns) == ("no_progress", 1)


# Limits


async def test_turn_limit_is_reached_after_as_many_turns_of_work(scripted: ScriptedModel) -> None:
    scripted.set_answers([call("look_up", {"city": "A"})], [call("look_up", {"city": "B"})], "It is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(turns=2)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("max_turns", "It is mild.", 3)
    assert [json.loads(output)["city"] for _, output in outputs_of(scripted.sent[2])] == ["A", "B"]
    last = scripted.sent[2]
    assert (last["tool_choice"], last["input"][-1]) == ("none", {"role": "user", "content": WRAP_UP})
    assert last["tools"] == [look_up.describe()]


async def test_run_of_as_many_turns_as_the_limit_is_final(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], "It is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(turns=2)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("final", "It is mild.", 2)


async def test_turn_limit_without_wrap_up_ends_the_run(scripted: ScriptedModel) -> None:
    scripted.set_answers([call("look_up", {"city": "A"})], [call("look_up", {"city": "B"})])
    outcome = await scripted.agent(tools=[look_up], limits=Limits(turns=2, wrap_up=False)).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.tool_calls) == ("max_turns", 2, 1)
    # The second call did not run, because no turn would read its result. It has an output nevertheless.
    assert error_of(outcome.history[-1]["output"]) == LIMIT_REACHED


async def test_tool_call_limit_ends_with_an_answer(scripted: ScriptedModel) -> None:
    cities = ["A", "B", "C"]
    scripted.set_answers([call("look_up", {"city": city}, f"call_{city}") for city in cities], "It is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(tool_calls=2)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.tool_calls, outcome.turns) == ("budget", "It is mild.", 2, 2)
    request = scripted.sent[1]
    assert [call_id for call_id, _ in outputs_of(request)] == ["call_A", "call_B", "call_C"]
    assert error_of(outputs_of(request)[2][1]) == LIMIT_REACHED
    assert request["tool_choice"] == "none"


async def test_token_limit_ends_with_an_answer(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK, usage(70, 30)], "It is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(tokens=100)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("budget", "It is mild.", 2)
    assert scripted.sent[1]["tool_choice"] == "none"


async def test_cost_limit_ends_with_an_answer(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK, usage(1_000_000, 100_000)], [{"text": "It is mild."}, usage(1_000_000, 0)])
    limits, prices = Limits(cost=3.0), Prices(input=2.0, output=10.0)
    outcome = await scripted.agent(tools=[look_up], limits=limits, prices=prices).run("Go.")
    assert (outcome.kind, outcome.text, outcome.cost) == ("budget", "It is mild.", 5.0)


async def test_budget_used_up_by_the_final_answer_is_no_failure(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": "It is mild."}, usage(70, 30)])
    assert (await scripted.agent(limits=Limits(tokens=10, wrap_up=False)).run("Go.")).kind == "final"


async def test_deadline_stops_running_calls_and_history_stays_valid(
    in_process: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted, stopped, watches = in_process, asyncio.Event(), list[StopTimer]()

    def make_watch(*arguments: Any) -> StopTimer:
        watches.append(StopTimer(*arguments))
        return watches[-1]

    monkeypatch.setattr(loop, "StopTimer", make_watch)

    @tool
    async def wait() -> str:
        """Wait."""
        # Simulate the timer at this point, independent of the elapsed time.
        asyncio.get_running_loop().call_soon(watches[0]._interrupt, "deadline")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    scripted.set_answers([{"text": "I wait."}, call("wait")], "Well.")
    agent = scripted.agent(tools=[wait], limits=Limits(seconds=600))
    events, outcome = await watch(agent.run_stream("Go."))
    assert (outcome.kind, outcome.text) == ("deadline", "I wait.")
    assert stopped.is_set()
    assert error_of(outcome.history[-1]["output"]) == CANCELLED
    # The call is not finished: when the run is resumed, its tool decides how it goes on.
    assert [event for event in events if isinstance(event, ToolFinished)] == []
    again = await scripted.agent(tools=[wait]).run("And now?", history=outcome.history)
    assert (again.kind, again.text) == ("final", "Well.")


async def test_deadline_stops_an_endless_model(scripted: ScriptedModel) -> None:
    scripted.set_answers([{"text": "Well"}, HOLD])
    outcome = await scripted.agent(limits=Limits(seconds=0.2)).run("Go.")
    assert (outcome.kind, outcome.turns) == ("deadline", 0)


# Loop guard


async def test_second_identical_call_is_warned_and_the_third_ends_tools(scripted: ScriptedModel) -> None:
    scripted.set_answers([LOOK], [call("look_up", '{ "city" : "Bern" }', "call_2")], [LOOK | {}], "It is mild.")
    events, outcome = await watch(scripted.agent(tools=[look_up]).run_stream("Go."))
    assert (outcome.kind, outcome.text, outcome.turns, outcome.tool_calls) == ("no_progress", "It is mild.", 4, 2)
    outputs = [output for _, output in outputs_of(scripted.sent[3])]
    assert outputs[0] == '{"city":"Bern","celsius":4}'
    assert outputs[1] == f"{outputs[0]}\n\n{WARNING}"
    assert error_of(outputs[2]) == STOPPED
    assert scripted.sent[3]["tool_choice"] == "none"
    assert [event.message for event in events if isinstance(event, Notice)] == [
        "look_up was called 2 times with the same arguments",
        "no_progress: the model is asked for its final answer",
    ]


async def test_identical_calls_in_one_turn_count(scripted: ScriptedModel) -> None:
    scripted.set_answers([call("look_up", {"city": "Bern"}, f"call_{n}") for n in range(3)], "It is mild.")
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("no_progress", 2)


async def test_repeatable_tool_may_repeat_a_call(scripted: ScriptedModel) -> None:
    @tool(repeatable=True)
    async def tick() -> str:
        """Say the time."""
        return "tick"

    scripted.set_answers(*[[call("tick")]] * 5, "Done.")
    outcome = await scripted.agent(tools=[tick]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("final", 5)
    assert {output for _, output in outputs_of(scripted.sent[-1])} == {"tick"}


# Cancelling


def make_waiting(begun: asyncio.Event) -> Tool:
    @tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    return wait


async def test_run_of_a_cancelled_task_can_be_resumed(scripted: ScriptedModel, ledger: Any) -> None:
    begun = asyncio.Event()
    scripted.set_answers([call("wait"), call("look_up", {"city": "Bern"}, "call_2")], "Well.")
    agent = scripted.agent(tools=[make_waiting(begun), look_up])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (summary,) = await ledger.runs()
    assert summary.status == "cancelled"
    paused = await agent.resume("run_1", ledger=ledger)
    approvals = {each.call_id: each.name != "wait" for each in paused.pending}
    assert (paused.kind, approvals["call_1"]) == ("needs_approval", False)
    outcome = await agent.resume("run_1", approvals=approvals, ledger=ledger)
    assert (outcome.kind, outcome.text) == ("final", "Well.")
    assert [call_id for call_id, _ in outputs_of(scripted.sent[-1])] == ["call_1", "call_2"]
    assert error_of(outputs_of(scripted.sent[-1])[0][1]) == INTERRUPTED


async def test_cancelled_run_leaves_no_tasks(in_process: ScriptedModel) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks, begun, cancel = asyncio.all_tasks(), asyncio.Event(), asyncio.Event()
    in_process.set_answers([call("wait"), call("explode", None, "call_2")], "Well.")
    agent = in_process.agent(tools=[make_waiting(begun), explode], limits=Limits(seconds=60))
    events = []
    async for event in agent.run_stream("Go.", cancel=cancel):
        events.append(event)
        if begun.is_set():
            cancel.set()
    assert [type(event) for event in events[-2:]] == [ToolFinished, RunEnded]
    assert all(type(event) is not RunEvent for event in events)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert asyncio.all_tasks() == tasks


async def test_closing_the_stream_cancels_the_run(scripted: ScriptedModel, ledger: Any) -> None:
    scripted.set_answers([{"text": "Well"}, HOLD], "It is mild.")
    agent = scripted.agent()
    events = agent.run_stream("Go.", ledger=ledger, run_id="run_1")
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()
    (summary,) = await ledger.runs()
    assert summary.status == "cancelled"
    assert (await agent.resume("run_1", ledger=ledger)).text == "It is mild."


async def test_cancel_event_ends_the_run_with_an_outcome(scripted: ScriptedModel) -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    scripted.set_answers([call("wait")], "Well.")
    agent = scripted.agent(tools=[make_waiting(begun)])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.wait()
    cancel.set()
    outcome = await running
    assert outcome.kind == "cancelled"
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state)
    assert (resumed.kind, [each.name for each in resumed.pending]) == ("needs_approval", ["wait"])
    assert resumed.state is not None
    denied = await agent.resume(resumed.state, approvals={"call_1": False})
    assert (denied.kind, denied.text) == ("final", "Well.")


async def test_cancel_event_stops_the_model(scripted: ScriptedModel) -> None:
    cancel = asyncio.Event()
    scripted.set_answers([{"text": "Well"}, HOLD], "It is mild.")
    agent = scripted.agent()
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await scripted.until_held()
    cancel.set()
    outcome = await running
    assert (outcome.kind, outcome.turns) == ("cancelled", 0)
    assert outcome.state is not None
    assert (await agent.resume(outcome.state)).text == "It is mild."


async def test_resumed_run_can_be_cancelled_again(scripted: ScriptedModel, ledger: Any) -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    scripted.set_answers([{"text": "Well"}, HOLD], [call("wait")], "Done.")
    agent = scripted.agent(tools=[make_waiting(begun)])
    running = asyncio.ensure_future(agent.run("Go.", ledger=ledger, run_id="run_1", cancel=cancel))
    await scripted.until_held()
    cancel.set()
    assert (await running).kind == "cancelled"
    running = asyncio.ensure_future(agent.resume("run_1", ledger=ledger))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await agent.resume("run_1", ledger=ledger)).kind == "needs_approval"
    outcome = await agent.resume("run_1", approvals={"call_1": False}, ledger=ledger)
    assert (outcome.kind, outcome.text) == ("final", "Done.")
    assert error_of(outputs_of(scripted.sent[-1])[0][1]) == INTERRUPTED
