"""What users of agent runtimes complain about, themes 1 to 8: broken conversations, runs that are lost or never end.

Each test names the case that it is after. None of them is true here.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from antiphon import Limits, tool
from antiphon.agent.outcome import (
    RunEnded,
    TextDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
    TurnFinished,
    TurnRestarted,
)
from antiphon.protocol.items import LOST_OUTPUT
from antiphon.store.ledger import SqliteLedger
from antiphon.tools.base import ToolContext
from support.agent_stage import DROP, HOLD, OurStage, Stage, TheirStage, call, look_up, outputs_of


@tool
async def explode() -> str:
    """Go wrong."""
    raise ValueError("no fuse")


LOOK = call("look_up", {"city": "Bern"})


def kinds_of(request: dict[str, Any]) -> list[str]:
    return [item.get("type", "message") for item in request["input"]]


# 1 Reasoning and continuations


async def test_pain_agents_1_reasoning_goes_back_with_what_followed_it_and_without_ids(stage: Stage) -> None:
    """vercel/ai#7099: a 400 about reasoning without its following item, after tool calls."""
    stage.play([{"reasoning": "Look."}, LOOK], [{"reasoning": "Again."}, call("look_up", {"city": "Rome"})], "Mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert outcome.text == "Mild."
    pair = ["reasoning", "function_call", "function_call_output"]
    assert kinds_of(stage.sent[2]) == ["message", *pair, *pair]
    assert not any("id" in item for item in stage.sent[2]["input"])


async def test_pain_agents_6_reasoning_that_led_to_nothing_is_not_handed_on(stage: Stage) -> None:
    """openai/openai-agents-python#2503: a handed-on history sends reasoning that has lost what it led to."""
    stage.play("I see.")
    lone = [{"role": "user", "content": "Go."}, {"type": "reasoning", "id": "rs_1", "summary": []}]
    assert (await stage.agent().run("And?", history=lone)).kind == "final"
    assert kinds_of(stage.sent[0]) == ["message", "message"]


async def test_pain_agents_11_every_call_has_its_output_when_the_server_keeps_the_conversation(stage: Stage) -> None:
    """openai/openai-agents-python#673: no tool output found for a function call, with previous_response_id."""
    made = [call("look_up", {"city": "Bern"}, "call_a"), call("explode", None, "call_b"), call("nobody", {}, "call_c")]
    stage.play(made, "I see.")
    outcome = await stage.agent(tools=[look_up, explode], state="server").run("Go.")
    assert outcome.text == "I see."
    assert "previous_response_id" in stage.sent[1]
    assert [call_id for call_id, _ in outputs_of(stage.sent[1])] == ["call_a", "call_b", "call_c"]


async def test_pain_agents_12_an_agent_that_is_handed_something_has_its_own_conversation(stage: Stage) -> None:
    """microsoft/agent-framework#4053: a stale previous_response_id goes along in a handoff."""
    stage.play([call("expert", {"input": "Bern?"}, "call_e")], [LOOK], "Mild.", "It is mild.")
    expert = stage.agent(name="expert", tools=[look_up], state="server")
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")], state="server").run("Go.")
    assert outcome.text == "It is mild."
    outer, inner, again, back = stage.sent
    assert "previous_response_id" not in outer | inner
    assert again["previous_response_id"] != back["previous_response_id"]
    assert kinds_of(again) == kinds_of(back) == ["function_call_output"]


async def test_pain_agents_14_tools_are_offered_in_every_turn(stage: Stage) -> None:
    """A forum's most asked: tools stop working after the first turn, because servers do not remember them."""
    stage.play([LOOK], [call("look_up", {"city": "Rome"})], "Mild.")
    await stage.agent(tools=[look_up], state="server").run("Go.")
    assert [request["tools"] for request in stage.sent] == [[look_up.describe()]] * 3


# 2 Calls and results that have lost each other


# Of every kind that has one: a call, and what comes back for it.
DONE = {"status": "completed"}
PRINTED = {"stdout": "forty-two", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,forty-two"}
FOUND = {"type": "function", "name": "forty-two", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALLS: dict[str, dict[str, Any]] = {
    "function": {"type": "function_call", "call_id": "c", "name": "x", "arguments": "{}"},
    "custom": {"type": "custom_tool_call", "call_id": "c", "name": "x", "input": "y"},
    "shell": {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}} | DONE,
    "local shell": {"type": "local_shell_call", "id": "lsh_1", "call_id": "c"}
    | {"action": {"type": "exec", "command": ["ls"], "env": {}}}
    | DONE,
    "computer": {"type": "computer_call", "id": "cu_1", "call_id": "c", "pending_safety_checks": []}
    | {"action": {"type": "screenshot"}}
    | DONE,
    "patch": {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}} | DONE,
    "tool search": {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}} | DONE,
}
RESULTS: dict[str, dict[str, Any]] = {
    "function": {"type": "function_call_output", "call_id": "c", "output": "forty-two"},
    "custom": {"type": "custom_tool_call_output", "call_id": "c", "output": "forty-two"},
    "shell": {"type": "shell_call_output", "call_id": "c", "output": [PRINTED]},
    "local shell": {"type": "local_shell_call_output", "id": "c", "output": "forty-two"},
    "computer": {"type": "computer_call_output", "call_id": "c", "output": SCREEN},
    "patch": {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "forty-two"},
    "tool search": {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [FOUND]},
}


@pytest.mark.parametrize("state", ["client", "server"])
@pytest.mark.parametrize("kind", CALLS)
async def test_pain_agents_15_a_conversation_that_stopped_at_a_call_can_be_used(
    stage: Stage, kind: str, state: str
) -> None:
    """strands-agents/harness-sdk#1123: a session that stopped at a tool call is unusable for ever."""
    stage.play("I see.")
    stopped = [{"role": "user", "content": "Go."}, CALLS[kind]]
    outcome = await stage.agent(state=state).run("And?", history=stopped)
    # The server, which is ours, refuses a call without its output.
    assert (outcome.kind, outcome.text) == ("final", "I see.")
    made = stage.sent[0]["input"][1:-1]
    assert LOST_OUTPUT in json.dumps(made)
    assert kinds_of(stage.sent[0])[1:-1] in ([CALLS[kind]["type"], RESULTS[kind]["type"]], ["message"])
    # Whoever knows what came of it can still say so.
    answered = await stage.agent(state=state).run([RESULTS[kind]], history=stopped)
    assert (answered.text, stage.sent[1]["input"][1:]) == ("I see.", [CALLS[kind], RESULTS[kind]])


@pytest.mark.parametrize("kind", sorted(set(CALLS) - {"function", "custom"}))
async def test_pain_agents_15_a_run_that_stopped_at_a_call_which_nobody_makes_can_be_gone_on_from(
    stage: Stage, kind: str
) -> None:
    """The same, where it was a run of ours that stopped there."""
    stage.play([{"item": CALLS[kind]}], "I see.")
    first = await stage.agent().run("Go.")
    assert (first.kind, len(first.history)) == ("no_progress", 2)
    assert (await stage.agent().run("And?", history=first.history)).text == "I see."


async def test_pain_agents_16_a_turn_that_broke_off_leaves_nothing_behind(stage: Stage) -> None:
    """agentscope-ai/agentscope#1905: a failure in mid-stream leaves a call without a result, and every retry fails."""
    stage.play([{"text": "Let me"}, LOOK, DROP], [LOOK], "Mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert (outcome.text, outcome.tool_calls) == ("Mild.", 1)
    assert kinds_of(stage.sent[1]) == ["message"]


async def test_pain_agents_19_agents_side_by_side_do_not_mix_their_histories(stage: OurStage) -> None:
    """github/copilot-cli#2543: concurrent sub-agents corrupt the history."""
    ask = [call("expert", {"input": city}, f"call_{city}") for city in ("Bern", "Rome")]
    rules = [
        {"user": city, "last_item": kind, "answers": [answer]}
        for city in ("Bern", "Rome")
        for kind, answer in (("message", [call("look_up", {"city": city})]), ("function_call_output", f"{city} it is."))
    ]
    stage.play_by(rules, ask, "Both.")
    expert = stage.agent(name="expert", tools=[look_up])
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")]).run("Go.")
    assert outcome.text == "Both."
    assert outputs_of(stage.sent[-1]) == [("call_Bern", "Bern it is."), ("call_Rome", "Rome it is.")]


@pytest.mark.parametrize("kind", RESULTS)
async def test_pain_agents_21_a_result_without_its_call_is_told_and_not_replayed_for_ever(
    stage: Stage, kind: str
) -> None:
    """Cloudgeni-ai/opengeni#61: an orphaned output is sent again and again, and refused each time."""
    stage.play("I see.", "I still see.")
    outcome = await stage.agent().run("And?", history=[RESULTS[kind]])
    assert outcome.text == "I see."
    told = stage.sent[0]["input"][0]
    assert (told["role"], "forty-two" in json.dumps(told["content"])) == ("user", True)
    # It is mended for good.
    assert RESULTS[kind] not in outcome.history
    assert (await stage.agent().run("Or?", history=outcome.history)).text == "I still see."


async def test_pain_agents_23_a_tool_that_cancels_something_of_its_own_is_an_error_like_any_other(stage: Stage) -> None:
    """langchain-ai/langgraph#6726: a CancelledError gets past the handling of errors, and the history is broken."""

    @tool
    async def give_up() -> str:
        """Give up."""
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        waiting.cancel()
        await waiting
        return ""

    stage.play([call("give_up")], "I see.")
    outcome = await stage.agent(tools=[give_up]).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "I see.")


# 3 Runs that are lost, 4 effects that come twice (tests/agent/test_crash.py has the crashes)


async def test_pain_agents_24_a_run_that_waits_is_resumed_after_a_restart(stage: Stage, tmp_path: Path) -> None:
    """mastra-ai/mastra#18031: a suspended run cannot be resumed after a restart, though it was stored."""
    paid: list[int] = []

    def make_agent() -> Any:
        @tool(needs_approval=True)
        async def pay(amount: int) -> str:
            """Pay."""
            paid.append(amount)
            return "paid"

        return stage.agent(tools=[pay])

    stage.play([call("pay", {"amount": 5})], "Done.")
    before = SqliteLedger(tmp_path / "runs.db")
    await make_agent().run("Go.", durable=before, run_id="run_1")
    await before.close()
    after = SqliteLedger(tmp_path / "runs.db")
    outcome = await make_agent().resume("run_1", approvals={"call_1": True}, durable=after)
    await after.close()
    assert (outcome.text, paid) == ("Done.", [5])


async def test_pain_agents_29_a_stream_is_as_durable_as_a_run(stage: Stage, tmp_path: Path) -> None:
    """pydantic/pydantic-ai#6620: streamed runs are silently not durable."""
    stage.play([LOOK], [{"text": "It"}, HOLD], "Mild.")
    ledger = SqliteLedger(tmp_path / "runs.db")
    agent = stage.agent(tools=[look_up])
    events = agent.run_stream("Go.", durable=ledger, run_id="run_1")
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()
    told = [event async for event in agent.resume_stream("run_1", durable=ledger)]
    await ledger.close()
    # And who watches the rest hears of it as of any other run.
    assert "".join(event.text for event in told if isinstance(event, TextDelta)) == "Mild."
    assert outputs_of(stage.sent[-1]) == [("call_1", "Bern: mild")]


async def test_pain_agents_34_every_attempt_at_a_call_has_the_same_key_and_no_other_call_has(stage: Stage) -> None:
    """ComposioHQ/composio#3654: a call that is tried again is made twice elsewhere, for want of a key."""
    keys: list[str] = []

    @tool(retries=2)
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if keys.count(keys[-1]) < 3:
            raise ConnectionError("lost")
        return "paid"

    # The model uses one id for all of its calls.
    stage.play([call("pay", {"amount": 5})], [call("pay", {"amount": 7})], "Done.")
    await stage.agent(tools=[pay]).run("Go.", run_id="run_1")
    assert Counter(keys) == {"run_1:1:0": 3, "run_1:2:0": 3}


# 5 Errors that end the run


async def test_pain_agents_35_a_hallucinated_tool_name_does_not_end_the_run(stage: Stage) -> None:
    """openai/openai-agents-python#325: a tool that is not there ended a run of ten minutes."""
    stage.play([call("lookup", {"city": "Bern"})], [LOOK], "Mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    told = json.loads(outputs_of(stage.sent[1])[0][1])
    assert told == {"error": "There is no tool 'lookup'. There are: look_up."}


async def test_pain_agents_38_an_error_in_a_tool_is_read_by_the_model_without_any_setting(stage: Stage) -> None:
    """langchain-ai/langgraph#6486: the handling of errors is off unless it is asked for."""
    stage.play([call("explode")], "I see.")
    assert (await stage.agent(tools=[explode]).run("Go.")).text == "I see."
    assert json.loads(outputs_of(stage.sent[1])[0][1]) == {"error": "ValueError: no fuse"}


# 6 Streams with tools


async def test_pain_agents_42_a_call_is_told_before_it_is_made_with_its_arguments(stage: Stage) -> None:
    """openai/openai-agents-python#583, #1629: told after the tool has finished, and with empty arguments."""
    gate = asyncio.Event()

    @tool
    async def wait(seconds: int) -> str:
        """Wait."""
        await gate.wait()
        return f"{seconds}"

    stage.play([call("wait", {"seconds": 5})], "Done.")
    async for event in stage.agent(tools=[wait]).run_stream("Go."):
        if isinstance(event, ToolStarted):
            assert event.call.arguments == '{"seconds":5}'
            gate.set()
    assert gate.is_set()


async def test_pain_agents_46_a_long_call_tells_how_far_it_is(stage: Stage) -> None:
    """openai/openai-agents-python#1333: no progress from long tools."""

    @tool
    async def work(context: ToolContext) -> str:
        """Work."""
        for part in range(3):
            context.report(f"{part} of 3")
        return "done"

    stage.play([call("work")], "Done.")
    told = [event async for event in stage.agent(tools=[work]).run_stream("Go.")]
    assert [event.message for event in told if isinstance(event, ToolProgress)] == ["0 of 3", "1 of 3", "2 of 3"]


async def test_pain_agents_48_everything_is_told_once_and_in_order(stage: Stage) -> None:
    """huggingface/smolagents#1974: the last step is told twice."""
    stage.play([LOOK], "Mild.")
    told = [event async for event in stage.agent(tools=[look_up]).run_stream("Go.")]
    ends = [type(event) for event in told if isinstance(event, TurnFinished | ToolFinished | RunEnded)]
    assert ends == [TurnFinished, ToolFinished, TurnFinished, RunEnded]


# 7 Streams that break off


async def test_pain_agents_52_a_connection_that_breaks_does_not_end_the_run(upstream: TheirStage) -> None:
    """strands-agents/harness-sdk#2771: a read error ends the turn, five times in a thousand."""
    upstream.play([LOOK], [{"text": "It"}, DROP], [{"text": "It is"}, DROP], "It is mild.")
    outcome = await upstream.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.text, outcome.tool_calls) == ("final", "It is mild.", 1)


async def test_pain_agents_53_who_watches_is_told_what_to_forget(upstream: TheirStage) -> None:
    """aden-hive/hive#6070, microsoft/agent-framework#1764: a retry adds to what was shown, and nobody can tell."""
    upstream.play([{"text": "It is"}, DROP], "It is mild.")
    shown = ""
    async for event in upstream.agent().run_stream("Go."):
        if isinstance(event, TextDelta):
            shown += event.text
        elif isinstance(event, TurnRestarted):
            shown = ""
    assert shown == "It is mild."


async def test_pain_agents_57_a_failure_that_the_server_tells_is_told(upstream: TheirStage) -> None:
    """openai/codex#43140: response.failed is hidden behind a timeout."""
    upstream.play([{"failure": {"code": "insufficient_quota", "message": "No money left."}}, HOLD])
    outcome = await upstream.agent().run("Go.")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("insufficient_quota", "No money left.")


# 8 Loops


async def test_pain_agents_60_a_model_that_repeats_itself_is_stopped(stage: Stage) -> None:
    """openai/openai-agents-python#191: the same call until max_turns."""
    stage.play([LOOK], [LOOK], [LOOK], "It is mild.")
    outcome = await stage.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.tool_calls, outcome.text) == ("no_progress", 2, "It is mild.")


async def test_pain_agents_61_at_the_limit_there_is_an_answer(stage: Stage) -> None:
    """openai/openai-agents-python#844: an exception, and all that was found out is lost."""
    stage.play([LOOK], [call("look_up", {"city": "Rome"})], "Bern is mild.")
    outcome = await stage.agent(tools=[look_up], limits=Limits(turns=3)).run("Go.")
    assert (outcome.kind, outcome.text, stage.sent[-1]["tool_choice"]) == ("max_turns", "Bern is mild.", "none")


async def test_pain_agents_65_an_agent_that_did_not_finish_says_so_to_its_asker(stage: Stage) -> None:
    """huggingface/smolagents#2287, openai/openai-agents-python#448: limits of nested agents, not settable, not told."""
    stage.play([call("expert", {"input": "Bern?"})], [LOOK], "Half of it.", "I see.")
    expert = stage.agent(name="expert", tools=[look_up], limits=Limits(turns=2))
    outcome = await stage.agent(tools=[expert.as_tool("expert", "Knows.")]).run("Go.")
    assert outcome.text == "I see."
    assert json.loads(outputs_of(stage.sent[-1])[0][1]) == {"error": "The agent ended with max_turns: Half of it."}
