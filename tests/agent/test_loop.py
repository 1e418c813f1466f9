"""The loop, on each of the ways to a model."""

import asyncio
import gc
import json
from typing import Any

import pytest

from antiphon import Limits, Prices, tool
from antiphon.agent import loop
from antiphon.agent.budget import StopTimer
from antiphon.agent.loop_guard import STOPPED, WARNING
from antiphon.agent.outcome import (
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
from antiphon.agent.steps import WRAP_UP
from antiphon.agent.tool_calls import CANCELLED, LIMIT_REACHED, RUN_STOPPED
from antiphon.tools.base import Tool, ToolContext, ToolInvocation
from support.agent_stage import DROP, HOLD, Stage, call, outputs_of, usage


@tool
async def look_up(city: str) -> dict[str, Any]:
    """The weather of a city."""
    return {"city": city, "celsius": len(city)}


LOOK = call("look_up", {"city": "Bern"})


def error_of(output: str) -> str:
    message: str = json.loads(output)["error"]
    return message


async def watch(events: Any) -> tuple[list[RunEvent], Outcome]:
    told = [event async for event in events]
    assert isinstance(told[-1], RunEnded)
    return told, told[-1].outcome


# Turns and calls


async def test_a_run_without_tools_ends_with_the_answer(stage: Stage) -> None:
    stage.play("It is mild.")
    outcome = await stage.agent(instructions="Be brief.").run("How is it?")
    assert (outcome.kind, outcome.output, outcome.text, outcome.turns, outcome.state) == (
        "final",
        "It is mild.",
        "It is mild.",
        1,
        None,
    )
    assert stage.sent == [
        {
            "model": "scripted",
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "How is it?"}],
            "include": ["reasoning.encrypted_content"],
            "store": False,
        }
    ]


async def test_what_a_tool_gives_is_read_in_the_next_turn(stage: Stage) -> None:
    stage.play([{"text": "Let me see."}, LOOK], "It is mild.")
    outcome = await stage.agent(tools=[look_up]).run("How is it?")
    assert (outcome.kind, outcome.text, outcome.turns, outcome.tool_calls) == ("final", "It is mild.", 2, 1)
    _, asked = stage.sent
    assert asked["tools"] == [look_up.describe()]
    assert [item.get("type", "message") for item in asked["input"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert outputs_of(asked) == [("call_1", '{"city":"Bern","celsius":4}')]
    assert not any("id" in item or "status" in item for item in asked["input"])


async def test_calls_of_a_turn_run_side_by_side_and_their_outputs_keep_their_order(stage: Stage) -> None:
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

    stage.play([call("slow", {"name": "a"}, "call_a"), call("quick", {"name": "b"}, "call_b")], "Done.")
    await stage.agent(tools=[slow, quick]).run("Go.")
    assert order == ["b", "a"]
    assert outputs_of(stage.sent[1]) == [("call_a", "a"), ("call_b", "b")]


async def test_the_events_tell_everything_in_order(stage: Stage) -> None:
    @tool
    async def work(context: ToolContext) -> str:
        """Work."""
        context.report("half way")
        context.report("caf\udce9")
        return "done"

    stage.play([call("work")], "All is done.")
    told, outcome = await watch(stage.agent(tools=[work]).run_stream("Go.", run_id="run_x"))
    made = ToolInvocation("call_1", "work", "{}")
    assert [type(event) for event in told] == [
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
    assert told[0] == TurnStarted("run_x", 1)
    assert told[2:6] == [
        ToolStarted("run_x", made),
        ToolProgress("run_x", "call_1", "half way"),
        ToolProgress("run_x", "call_1", "caf?"),
        ToolFinished("run_x", made, "done", False),
    ]
    assert "".join(event.text for event in told if isinstance(event, TextDelta)) == outcome.text == "All is done."


async def test_reasoning_goes_back_with_the_call_it_led_to(stage: Stage) -> None:
    stage.play([{"reasoning": "I should look."}, LOOK], "Mild.")
    await stage.agent(tools=[look_up]).run("How is it?")
    kinds = [item.get("type", "message") for item in stage.sent[1]["input"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]


# What goes wrong in a turn goes back to the model


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
async def test_what_goes_wrong_in_a_call_is_its_output(stage: Stage, made: dict[str, Any], reason: str) -> None:
    stage.play([made], "I see.")
    outcome = await stage.agent(tools=[look_up, explode]).run("Go.")
    ((_, output),) = outputs_of(stage.sent[1])
    assert (outcome.kind, outcome.text) == ("final", "I see.")
    assert error_of(output).startswith(reason)


async def test_a_turn_that_breaks_off_is_taken_again_and_no_tool_is_called_twice(stage: Stage) -> None:
    calls = []

    @tool
    async def charge(amount: int) -> str:
        """Take money."""
        calls.append(amount)
        return "paid"

    stage.play([call("charge", {"amount": 5})], [{"text": "It is"}, DROP], "It is paid.")
    told, outcome = await watch(stage.agent(tools=[charge]).run_stream("Pay."))
    assert (outcome.kind, outcome.text, outcome.turns, calls) == ("final", "It is paid.", 2, [5])
    kinds = [type(event) for event in told if isinstance(event, TurnStarted | TurnRestarted | TurnFinished)]
    assert kinds == [TurnStarted, TurnFinished, TurnStarted, TurnRestarted, TurnFinished]
    assert stage.sent[1] == stage.sent[2]


async def test_a_turn_that_never_comes_to_its_end_fails_the_run_which_can_be_resumed(stage: Stage) -> None:
    stage.play(*[[{"text": "It"}, DROP]] * 3, "It is mild.")
    agent = stage.agent()
    outcome = await agent.run("How is it?")
    assert (outcome.kind, outcome.turns) == ("failed", 0)
    assert outcome.error is not None
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state)
    assert (resumed.kind, resumed.text, resumed.run_id) == ("final", "It is mild.", outcome.run_id)


async def test_what_a_server_refuses_fails_the_run_at_once(stage: Stage) -> None:
    error = {"message": "No such thing.", "status": 400, "type": "invalid_request_error", "code": "bad", "param": None}
    stage.play([{"raise": error}])
    outcome = await stage.agent().run("How is it?")
    assert outcome.kind == "failed"
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("bad", "No such thing.")
    assert len(stage.sent) == 1


async def test_an_answer_that_was_cut_off_is_no_final_one(stage: Stage) -> None:
    stage.play([{"text": "It is mi"}, {"finish": "length"}])
    outcome = await stage.agent().run("How is it?")
    assert (outcome.kind, outcome.text) == ("failed", "It is mi")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.raw) == ("max_output_tokens", "It is mi")


async def test_a_call_that_was_cut_off_is_not_made_and_the_others_are(stage: Stage) -> None:
    torn = call("look_up", '{"city": "Ro', "call_2")
    stage.play([LOOK, {"reasoning": "And Rome."}, torn, {"finish": "length"}], "Mild.")
    outcome = await stage.agent(tools=[look_up], state="server").run("How is it?")
    assert outcome.kind == "final"
    asked = stage.sent[1]
    # What the server has stored ends with a call that nobody can answer, so it is not continued from there.
    assert "previous_response_id" not in asked
    assert [item.get("call_id", item.get("role")) for item in asked["input"]] == ["user", "call_1", "call_1"]


async def test_a_turn_without_text_or_calls_ends_the_run(stage: Stage) -> None:
    stage.play([{"text": " "}])
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.turns) == ("no_progress", 1)


# Limits


async def test_at_the_limit_of_turns_the_last_one_is_for_the_answer(stage: Stage) -> None:
    stage.play([call("look_up", {"city": "A"})], [call("look_up", {"city": "B"})], "It is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(turns=3)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("max_turns", "It is mild.", 3)
    last = stage.sent[2]
    assert (last["tool_choice"], last["input"][-1]) == ("none", {"role": "user", "content": WRAP_UP})
    assert last["tools"] == [look_up.describe()]


async def test_without_a_last_word_the_limit_of_turns_ends_the_run(stage: Stage) -> None:
    stage.play([call("look_up", {"city": "A"})], [call("look_up", {"city": "B"})])
    outcome = await stage.agent(tools=[look_up], limits=Limits(turns=2, wrap_up=False)).run("Go.")
    assert (outcome.kind, outcome.turns, outcome.tool_calls) == ("max_turns", 2, 1)
    # The second call was not made, since nobody would have read what it came to. Still it has an output.
    assert error_of(outcome.history[-1]["output"]) == LIMIT_REACHED


async def test_at_the_limit_of_calls_the_model_answers_with_what_it_has(stage: Stage) -> None:
    cities = ["A", "B", "C"]
    stage.play([call("look_up", {"city": city}, f"call_{city}") for city in cities], "It is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(tool_calls=2)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.tool_calls, outcome.turns) == ("budget", "It is mild.", 2, 2)
    asked = stage.sent[1]
    assert [call_id for call_id, _ in outputs_of(asked)] == ["call_A", "call_B", "call_C"]
    assert error_of(outputs_of(asked)[2][1]) == LIMIT_REACHED
    assert asked["tool_choice"] == "none"


async def test_at_the_limit_of_tokens_the_model_answers_with_what_it_has(stage: Stage) -> None:
    stage.play([LOOK, usage(70, 30)], "It is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(tokens=100)).run("Go.")
    assert (outcome.kind, outcome.text, outcome.turns) == ("budget", "It is mild.", 2)
    assert stage.sent[1]["tool_choice"] == "none"


async def test_at_the_limit_of_cost_the_model_answers_with_what_it_has(stage: Stage) -> None:
    stage.play([LOOK, usage(1_000_000, 100_000)], [{"text": "It is mild."}, usage(1_000_000, 0)])
    limits, prices = Limits(cost=3.0), Prices(input=2.0, output=10.0)
    outcome = await stage.agent(tools=[look_up], limits=limits, prices=prices).run("Go.")
    assert (outcome.kind, outcome.text, outcome.cost) == ("budget", "It is mild.", 5.0)


async def test_a_budget_that_is_used_up_by_the_answer_itself_is_no_matter(stage: Stage) -> None:
    stage.play([{"text": "It is mild."}, usage(70, 30)])
    assert (await stage.agent(limits=Limits(tokens=10, wrap_up=False)).run("Go.")).kind == "final"


async def test_at_the_deadline_what_runs_is_stopped_and_the_history_can_be_continued(
    here: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, stopped, watches = here, asyncio.Event(), list[StopTimer]()

    def make_watch(*arguments: Any) -> StopTimer:
        watches.append(StopTimer(*arguments))
        return watches[-1]

    monkeypatch.setattr(loop, "StopTimer", make_watch)

    @tool
    async def wait() -> str:
        """Wait."""
        # However long it took to get here, the time is up now, as the timer would report.
        asyncio.get_running_loop().call_soon(watches[0]._interrupt, "deadline")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    stage.play([{"text": "I wait."}, call("wait")], "Well.")
    agent = stage.agent(tools=[wait], limits=Limits(seconds=600))
    told, outcome = await watch(agent.run_stream("Go."))
    assert (outcome.kind, outcome.text) == ("deadline", "I wait.")
    assert stopped.is_set()
    assert error_of(outcome.history[-1]["output"]) == CANCELLED
    assert [event.is_error for event in told if isinstance(event, ToolFinished)] == [True]
    again = await stage.agent(tools=[wait]).run("And now?", history=outcome.history)
    assert (again.kind, again.text) == ("final", "Well.")


async def test_the_deadline_stops_a_model_that_does_not_come_to_an_end(stage: Stage) -> None:
    stage.play([{"text": "Well"}, HOLD])
    outcome = await stage.agent(limits=Limits(seconds=0.2)).run("Go.")
    assert (outcome.kind, outcome.turns) == ("deadline", 0)


# Going in circles


async def test_the_second_identical_call_is_warned_about_and_the_third_is_the_last(stage: Stage) -> None:
    stage.play([LOOK], [call("look_up", '{ "city" : "Bern" }', "call_2")], [LOOK | {}], "It is mild.")
    told, outcome = await watch(stage.agent(tools=[look_up]).run_stream("Go."))
    assert (outcome.kind, outcome.text, outcome.turns, outcome.tool_calls) == ("no_progress", "It is mild.", 4, 2)
    outputs = [output for _, output in outputs_of(stage.sent[3])]
    assert outputs[0] == '{"city":"Bern","celsius":4}'
    assert outputs[1] == f"{outputs[0]}\n\n{WARNING}"
    assert error_of(outputs[2]) == STOPPED
    assert stage.sent[3]["tool_choice"] == "none"
    assert [event.message for event in told if isinstance(event, Notice)] == [
        "look_up was called 2 times with the same arguments",
        "no_progress: the model is asked for its final answer",
    ]


async def test_identical_calls_of_one_turn_count_too(stage: Stage) -> None:
    stage.play([call("look_up", {"city": "Bern"}, f"call_{n}") for n in range(3)], "It is mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("no_progress", 2)


async def test_a_repeatable_tool_may_be_called_again_and_again(stage: Stage) -> None:
    @tool(repeatable=True)
    async def tick() -> str:
        """Say the time."""
        return "tick"

    stage.play(*[[call("tick")]] * 5, "Done.")
    outcome = await stage.agent(tools=[tick]).run("Go.")
    assert (outcome.kind, outcome.tool_calls) == ("final", 5)
    assert {output for _, output in outputs_of(stage.sent[-1])} == {"tick"}


# Cancelling


def make_waiting(begun: asyncio.Event) -> Tool:
    @tool
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    return wait


async def test_a_cancelled_task_leaves_a_run_that_can_be_resumed(stage: Stage, ledger: Any) -> None:
    begun = asyncio.Event()
    stage.play([call("wait"), call("look_up", {"city": "Bern"}, "call_2")], "Well.")
    agent = stage.agent(tools=[make_waiting(begun), look_up])
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (summary,) = await ledger.runs()
    assert summary.status == "cancelled"
    outcome = await agent.resume("run_1", durable=ledger)
    assert (outcome.kind, outcome.text) == ("final", "Well.")
    assert [call_id for call_id, _ in outputs_of(stage.sent[-1])] == ["call_1", "call_2"]
    assert error_of(outputs_of(stage.sent[-1])[0][1]) == CANCELLED


async def test_nothing_is_left_behind_when_a_run_is_cancelled(here: Stage) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks, begun, cancel = asyncio.all_tasks(), asyncio.Event(), asyncio.Event()
    here.play([call("wait"), call("explode", None, "call_2")], "Well.")
    agent = here.agent(tools=[make_waiting(begun), explode], limits=Limits(seconds=60))
    told = []
    async for event in agent.run_stream("Go.", cancel=cancel):
        told.append(event)
        if begun.is_set():
            cancel.set()
    assert [type(event) for event in told[-2:]] == [ToolFinished, RunEnded]
    assert all(type(event) is not RunEvent for event in told)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert asyncio.all_tasks() == tasks


async def test_closing_the_stream_cancels_the_run(stage: Stage, ledger: Any) -> None:
    stage.play([{"text": "Well"}, HOLD], "It is mild.")
    agent = stage.agent()
    events = agent.run_stream("Go.", durable=ledger, run_id="run_1")
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()
    (summary,) = await ledger.runs()
    assert summary.status == "cancelled"
    assert (await agent.resume("run_1", durable=ledger)).text == "It is mild."


async def test_the_cancel_event_ends_the_run_with_an_outcome(stage: Stage) -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    stage.play([call("wait")], "Well.")
    agent = stage.agent(tools=[make_waiting(begun)])
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await begun.wait()
    cancel.set()
    outcome = await running
    assert outcome.kind == "cancelled"
    assert outcome.state is not None
    resumed = await agent.resume(outcome.state)
    assert (resumed.kind, resumed.text) == ("final", "Well.")


async def test_the_cancel_event_stops_the_model(stage: Stage) -> None:
    cancel = asyncio.Event()
    stage.play([{"text": "Well"}, HOLD], "It is mild.")
    agent = stage.agent()
    running = asyncio.ensure_future(agent.run("Go.", cancel=cancel))
    await stage.until_held()
    cancel.set()
    outcome = await running
    assert (outcome.kind, outcome.turns) == ("cancelled", 0)
    assert outcome.state is not None
    assert (await agent.resume(outcome.state)).text == "It is mild."


async def test_cancelled_before_it_began_a_run_does_nothing(stage: Stage) -> None:
    cancel = asyncio.Event()
    cancel.set()
    outcome = await stage.agent().run("Go.", cancel=cancel)
    assert (outcome.kind, stage.sent) == ("cancelled", [])


async def test_a_resumed_run_can_be_cancelled_again(stage: Stage, ledger: Any) -> None:
    begun, cancel = asyncio.Event(), asyncio.Event()
    stage.play([{"text": "Well"}, HOLD], [call("wait")], "Done.")
    agent = stage.agent(tools=[make_waiting(begun)])
    running = asyncio.ensure_future(agent.run("Go.", durable=ledger, run_id="run_1", cancel=cancel))
    await stage.until_held()
    cancel.set()
    assert (await running).kind == "cancelled"
    running = asyncio.ensure_future(agent.resume("run_1", durable=ledger))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    outcome = await agent.resume("run_1", durable=ledger)
    assert (outcome.kind, outcome.text) == ("final", "Done.")
    assert error_of(outputs_of(stage.sent[-1])[0][1]) == CANCELLED


async def test_calls_that_were_not_begun_say_so(stage: Stage) -> None:
    cancel = asyncio.Event()
    stage.play([LOOK], "Well.")
    outcome: Outcome | None = None
    async for event in stage.agent(tools=[look_up]).run_stream("Go.", cancel=cancel):
        if isinstance(event, TurnFinished):
            cancel.set()
        elif isinstance(event, RunEnded):
            outcome = event.outcome
    assert outcome is not None
    assert (outcome.kind, error_of(outcome.history[-1]["output"])) == ("cancelled", RUN_STOPPED)
