"""Complaints about agent runtimes, themes 1 to 8: broken conversations, lost runs, endless runs.

Each test names its case and shows that it does not happen here.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from antiphon import Limits, ParallelGuardrail, tool
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
from support.scripted_model import DROP, HOLD, AntiphonModel, ScriptedModel, UpstreamModel, call, look_up, outputs_of


@tool
async def explode() -> str:
    """Go wrong."""
    raise ValueError("no fuse")


LOOK = call("look_up", {"city": "Bern"})


def kinds_of(request: dict[str, Any]) -> list[str]:
    return [item.get("type", "message") for item in request["input"]]


# 1 Reasoning and continuations


async def test_pain_agents_1_reasoning_is_sent_back_with_its_call_without_ids(scripted: ScriptedModel) -> None:
    """vercel/ai#7099: a 400 about reasoning without its following item, after tool calls."""
    scripted.set_answers(
        [{"reasoning": "Look."}, LOOK], [{"reasoning": "Again."}, call("look_up", {"city": "Rome"})], "Mild."
    )
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert outcome.text == "Mild."
    pair = ["reasoning", "function_call", "function_call_output"]
    assert kinds_of(scripted.sent[2]) == ["message", *pair, *pair]
    # Encrypted reasoning keeps the id with which some servers decrypt it.
    assert not any("id" in item for item in scripted.sent[2]["input"] if not item.get("encrypted_content"))


async def test_pain_agents_6_reasoning_that_led_to_nothing_is_dropped(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#2503: a history passed on contains reasoning without the item that it led to."""
    scripted.set_answers("I see.")
    lone = [{"role": "user", "content": "Go."}, {"type": "reasoning", "id": "rs_1", "summary": []}]
    assert (await scripted.agent().run("And?", history=lone)).kind == "final"
    assert kinds_of(scripted.sent[0]) == ["message", "message"]


async def test_pain_agents_10_hosted_calls_are_sent_back_with_their_reasoning(scripted: ScriptedModel) -> None:
    """pydantic/pydantic-ai#2870, vercel/ai#8379: reasoning goes back without the web search that followed it."""
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    scripted.set_answers([{"reasoning": "Search."}, {"item": search}, {"text": "Found."}, LOOK], "Mild.")
    assert (await scripted.agent(tools=[look_up]).run("Go.")).text == "Mild."
    kinds = ["message", "reasoning", "web_search_call", "message", "function_call", "function_call_output"]
    assert kinds_of(scripted.sent[1]) == kinds


async def test_pain_agents_11_every_call_has_an_output_with_server_state(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#673: no tool output found for a function call, with previous_response_id."""
    made = [call("look_up", {"city": "Bern"}, "call_a"), call("explode", None, "call_b"), call("nobody", {}, "call_c")]
    scripted.set_answers(made, "I see.")
    outcome = await scripted.agent(tools=[look_up, explode], conversation_state="server").run("Go.")
    assert outcome.text == "I see."
    assert "previous_response_id" in scripted.sent[1]
    assert [call_id for call_id, _ in outputs_of(scripted.sent[1])] == ["call_a", "call_b", "call_c"]


async def test_pain_agents_12_subagent_has_its_own_conversation(scripted: ScriptedModel) -> None:
    """microsoft/agent-framework#4053: a stale previous_response_id goes along in a handoff."""
    scripted.set_answers([call("expert", {"input": "Bern?"}, "call_e")], [LOOK], "Mild.", "It is mild.")
    expert = scripted.agent(name="expert", tools=[look_up], conversation_state="server")
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")], conversation_state="server").run("Go.")
    assert outcome.text == "It is mild."
    outer, inner, again, back = scripted.sent
    assert "previous_response_id" not in outer | inner
    assert again["previous_response_id"] != back["previous_response_id"]
    assert kinds_of(again) == kinds_of(back) == ["function_call_output"]


async def test_pain_agents_14_tools_are_sent_in_every_turn(scripted: ScriptedModel) -> None:
    """A frequent forum question: tools stop working after the first turn, because servers do not store them."""
    scripted.set_answers([LOOK], [call("look_up", {"city": "Rome"})], "Mild.")
    await scripted.agent(tools=[look_up], conversation_state="server").run("Go.")
    assert [request["tools"] for request in scripted.sent] == [[look_up.describe()]] * 3


# 2 Calls without outputs and outputs without calls


# For each call type: a call and its output.
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
async def test_pain_agents_15_history_that_ends_with_a_call_can_be_used(
    scripted: ScriptedModel, kind: str, state: str
) -> None:
    """strands-agents/harness-sdk#1123: a session that stopped at a tool call is unusable for ever."""
    scripted.set_answers("I see.")
    stopped = [{"role": "user", "content": "Go."}, CALLS[kind]]
    outcome = await scripted.agent(conversation_state=state).run("And?", history=stopped)
    # The Antiphon server rejects a call without its output.
    assert (outcome.kind, outcome.text) == ("final", "I see.")
    made = scripted.sent[0]["input"][1:-1]
    assert LOST_OUTPUT in json.dumps(made)
    assert kinds_of(scripted.sent[0])[1:-1] in ([CALLS[kind]["type"], RESULTS[kind]["type"]], ["message"])
    # A client that has the output can still send it.
    answered = await scripted.agent(conversation_state=state).run([RESULTS[kind]], history=stopped)
    assert (answered.text, scripted.sent[1]["input"][1:]) == ("I see.", [CALLS[kind], RESULTS[kind]])


@pytest.mark.parametrize("kind", sorted(set(CALLS) - {"function", "custom"}))
async def test_pain_agents_15_run_that_ends_with_an_unsupported_call_continues(
    scripted: ScriptedModel, kind: str
) -> None:
    """The same for a run of an agent."""
    scripted.set_answers([{"item": CALLS[kind]}], "I see.")
    first = await scripted.agent().run("Go.")
    assert (first.kind, len(first.history)) == ("no_progress", 2)
    assert (await scripted.agent().run("And?", history=first.history)).text == "I see."


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {"city": "Bern"}}])
async def test_pain_agents_18_call_without_valid_arguments_is_repaired(
    scripted: ScriptedModel, given: dict[str, Any]
) -> None:
    """openclaw/openclaw#19048: one malformed call in a history makes every later request fail."""
    scripted.set_answers("I see.")
    made = {"type": "function_call", "call_id": "c", "name": "look_up", **given}
    outcome = await scripted.agent().run("And?", history=[made, RESULTS["function"]])
    # The Antiphon server rejects a call whose arguments are no text.
    assert (outcome.kind, outcome.text) == ("final", "I see.")
    assert scripted.sent[0]["input"][0]["arguments"] == ('{"city":"Bern"}' if given.get("arguments") else "{}")


async def test_pain_agents_16_broken_turn_leaves_no_items(scripted: ScriptedModel) -> None:
    """agentscope-ai/agentscope#1905: a failure in mid-stream leaves a call without a result, and every retry fails."""
    scripted.set_answers([{"text": "Let me"}, LOOK, DROP], [LOOK], "Mild.")
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert (outcome.text, outcome.tool_calls) == ("Mild.", 1)
    assert kinds_of(scripted.sent[1]) == ["message"]


async def test_pain_agents_19_concurrent_agents_do_not_mix_histories(scripted: AntiphonModel) -> None:
    """github/copilot-cli#2543: concurrent sub-agents corrupt the history."""
    ask = [call("expert", {"input": city}, f"call_{city}") for city in ("Bern", "Rome")]
    rules = [
        {"user": city, "last_item": kind, "answers": [answer]}
        for city in ("Bern", "Rome")
        for kind, answer in (("message", [call("look_up", {"city": city})]), ("function_call_output", f"{city} it is."))
    ]
    scripted.set_answers_by_rule(rules, ask, "Both.")
    expert = scripted.agent(name="expert", tools=[look_up])
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")]).run("Go.")
    assert outcome.text == "Both."
    assert outputs_of(scripted.sent[-1]) == [("call_Bern", "Bern it is."), ("call_Rome", "Rome it is.")]


@pytest.mark.parametrize("kind", RESULTS)
async def test_pain_agents_21_output_without_call_becomes_a_message(scripted: ScriptedModel, kind: str) -> None:
    """Cloudgeni-ai/opengeni#61: an orphaned output is sent with every request and rejected each time."""
    scripted.set_answers("I see.", "I still see.")
    outcome = await scripted.agent().run("And?", history=[RESULTS[kind]])
    assert outcome.text == "I see."
    events = scripted.sent[0]["input"][0]
    assert (events["role"], "forty-two" in json.dumps(events["content"])) == ("user", True)
    # The repair is permanent.
    assert RESULTS[kind] not in outcome.history
    assert (await scripted.agent().run("Or?", history=outcome.history)).text == "I still see."


async def test_pain_agents_23_tool_that_cancels_itself_returns_an_error(scripted: ScriptedModel) -> None:
    """langchain-ai/langgraph#6726: a CancelledError bypasses the error handling and breaks the history."""

    @tool
    async def give_up() -> str:
        """Give up."""
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        waiting.cancel()
        await waiting
        return ""

    scripted.set_answers([call("give_up")], "I see.")
    outcome = await scripted.agent(tools=[give_up]).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "I see.")


async def await_cancelled_task(*_: Any) -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"instructions": await_cancelled_task}, "instructions_failed"),
        ({"tools": await_cancelled_task}, "tools_failed"),
        ({"history_filter": await_cancelled_task}, "history_filter_failed"),
        ({"input_guardrails": [await_cancelled_task]}, "guardrail_failed"),
        ({"input_guardrails": [ParallelGuardrail(await_cancelled_task)]}, "guardrail_failed"),
        ({"output_guardrails": [await_cancelled_task]}, "guardrail_failed"),
        ({"hooks": [await_cancelled_task]}, None),
    ],
)
async def test_pain_agents_23_function_that_cancels_itself_does_not_cancel_the_run(
    scripted: ScriptedModel, options: dict[str, Any], code: str | None
) -> None:
    """langchain-ai/langgraph#6726: in a task group, a run that raises CancelledError would be lost silently."""
    scripted.set_answers("I see.")
    outcome = await scripted.agent(**options).run("Go.")
    assert outcome.kind == ("final" if code is None else "failed")
    assert code == (outcome.error.code if outcome.error is not None else None)


# 3 Lost runs, 4 repeated effects (crashes are in tests/agent/test_resume.py)


async def test_pain_agents_24_waiting_run_is_resumed_after_a_restart(scripted: ScriptedModel, tmp_path: Path) -> None:
    """mastra-ai/mastra#18031: a suspended run cannot be resumed after a restart, though it was stored."""
    paid: list[int] = []

    def make_agent() -> Any:
        @tool(needs_approval=True)
        async def pay(amount: int) -> str:
            """Pay."""
            paid.append(amount)
            return "paid"

        return scripted.agent(tools=[pay])

    scripted.set_answers([call("pay", {"amount": 5})], "Done.")
    before = SqliteLedger(tmp_path / "runs.db")
    await make_agent().run("Go.", ledger=before, run_id="run_1")
    await before.close()
    after = SqliteLedger(tmp_path / "runs.db")
    outcome = await make_agent().resume("run_1", approvals={"call_1": True}, ledger=after)
    await after.close()
    assert (outcome.text, paid) == ("Done.", [5])


async def test_pain_agents_29_streamed_run_is_durable(scripted: ScriptedModel, tmp_path: Path) -> None:
    """pydantic/pydantic-ai#6620: streamed runs are silently not durable."""
    scripted.set_answers([LOOK], [{"text": "It"}, HOLD], "Mild.")
    ledger = SqliteLedger(tmp_path / "runs.db")
    agent = scripted.agent(tools=[look_up])
    events = agent.run_stream("Go.", ledger=ledger, run_id="run_1")
    async for event in events:
        if isinstance(event, TextDelta):
            break
    await events.aclose()
    events = [event async for event in agent.resume_stream("run_1", ledger=ledger)]
    await ledger.close()
    # The resumed stream has the events of the rest.
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Mild."
    assert outputs_of(scripted.sent[-1]) == [("call_1", "Bern: mild")]


async def test_pain_agents_34_attempts_at_a_call_share_one_unique_key(scripted: ScriptedModel) -> None:
    """ComposioHQ/composio#3654: a repeated call takes effect twice, because it has no idempotency key."""
    keys: list[str] = []

    @tool(retries=2)
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay."""
        keys.append(context.idempotency_key)
        if keys.count(keys[-1]) < 3:
            raise ConnectionError("lost")
        return "paid"

    # The model uses one id for all of its calls.
    scripted.set_answers([call("pay", {"amount": 5})], [call("pay", {"amount": 7})], "Done.")
    await scripted.agent(tools=[pay]).run("Go.", run_id="run_1")
    assert Counter(keys) == {"run_1:1:0": 3, "run_1:2:0": 3}


# 5 Errors that end the run


async def test_pain_agents_35_unknown_tool_name_does_not_end_the_run(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#325: an unknown tool ended a run of ten minutes."""
    scripted.set_answers([call("lookup", {"city": "Bern"})], [LOOK], "Mild.")
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.text) == ("final", "Mild.")
    events = json.loads(outputs_of(scripted.sent[1])[0][1])
    assert events == {"error": "There is no tool 'lookup'. There are: look_up."}


async def test_pain_agents_38_model_reads_tool_errors_by_default(scripted: ScriptedModel) -> None:
    """langchain-ai/langgraph#6486: error handling is off by default."""
    scripted.set_answers([call("explode")], "I see.")
    assert (await scripted.agent(tools=[explode]).run("Go.")).text == "I see."
    assert json.loads(outputs_of(scripted.sent[1])[0][1]) == {"error": "ValueError: no fuse"}


# 6 Streams with tools


async def test_pain_agents_42_call_event_precedes_the_call(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#583, #1629: the event comes after the tool has finished, with empty arguments."""
    gate = asyncio.Event()

    @tool
    async def wait(seconds: int) -> str:
        """Wait."""
        await gate.wait()
        return f"{seconds}"

    scripted.set_answers([call("wait", {"seconds": 5})], "Done.")
    async for event in scripted.agent(tools=[wait]).run_stream("Go."):
        if isinstance(event, ToolStarted):
            assert event.call.arguments == '{"seconds":5}'
            gate.set()
    assert gate.is_set()


async def test_pain_agents_46_long_call_reports_progress(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#1333: no progress from long tools."""

    @tool
    async def work(context: ToolContext) -> str:
        """Work."""
        for part in range(3):
            context.report(f"{part} of 3")
        return "done"

    scripted.set_answers([call("work")], "Done.")
    events = [event async for event in scripted.agent(tools=[work]).run_stream("Go.")]
    assert [event.message for event in events if isinstance(event, ToolProgress)] == ["0 of 3", "1 of 3", "2 of 3"]


async def test_pain_agents_48_events_are_complete_and_ordered(scripted: ScriptedModel) -> None:
    """huggingface/smolagents#1974: the last step is reported twice."""
    scripted.set_answers([LOOK], "Mild.")
    events = [event async for event in scripted.agent(tools=[look_up]).run_stream("Go.")]
    ends = [type(event) for event in events if isinstance(event, TurnFinished | ToolFinished | RunEnded)]
    assert ends == [TurnFinished, ToolFinished, TurnFinished, RunEnded]


# 7 Broken streams


async def test_pain_agents_52_broken_connection_does_not_end_the_run(upstream: UpstreamModel) -> None:
    """strands-agents/harness-sdk#2771: a read error ends the turn, five times in a thousand."""
    upstream.set_answers([LOOK], [{"text": "It"}, DROP], [{"text": "It is"}, DROP], "It is mild.")
    outcome = await upstream.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.text, outcome.tool_calls) == ("final", "It is mild.", 1)


async def test_pain_agents_53_restarted_turn_is_announced(upstream: UpstreamModel) -> None:
    """aden-hive/hive#6070, microsoft/agent-framework#1764: a retry appends to the shown text unnoticed."""
    upstream.set_answers([{"text": "It is"}, DROP], "It is mild.")
    shown = ""
    async for event in upstream.agent().run_stream("Go."):
        if isinstance(event, TextDelta):
            shown += event.text
        elif isinstance(event, TurnRestarted):
            shown = ""
    assert shown == "It is mild."


async def test_pain_agents_54_call_of_a_broken_turn_is_not_run(upstream: UpstreamModel) -> None:
    """shiaho777/web-to-app#747: after a retry, calls of the broken attempt are run too."""
    upstream.set_answers([call("look_up", {"city": "Rome"}, "call_r"), DROP], [LOOK], "Mild.")
    outcome = await upstream.agent(tools=[look_up]).run("Go.")
    assert (outcome.text, outcome.tool_calls) == ("Mild.", 1)
    assert outputs_of(upstream.sent[-1]) == [("call_1", "Bern: mild")]


async def test_pain_agents_57_failure_of_the_server_is_reported(upstream: UpstreamModel) -> None:
    """openai/codex#43140: response.failed is hidden behind a timeout."""
    upstream.set_answers([{"failure": {"code": "insufficient_quota", "message": "No money left."}}, HOLD])
    outcome = await upstream.agent().run("Go.")
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == ("insufficient_quota", "No money left.")


# 8 Loops


async def test_pain_agents_60_repeating_model_is_stopped(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#191: the same call until max_turns."""
    scripted.set_answers([LOOK], [LOOK], [LOOK], "It is mild.")
    outcome = await scripted.agent(tools=[look_up]).run("Go.")
    assert (outcome.kind, outcome.tool_calls, outcome.text) == ("no_progress", 2, "It is mild.")


async def test_pain_agents_61_turn_limit_ends_with_an_answer(scripted: ScriptedModel) -> None:
    """openai/openai-agents-python#844: an exception, and all results are lost."""
    scripted.set_answers([LOOK], [call("look_up", {"city": "Rome"})], "Bern is mild.")
    outcome = await scripted.agent(tools=[look_up], limits=Limits(turns=2)).run("Go.")
    assert (outcome.kind, outcome.text, scripted.sent[-1]["tool_choice"]) == ("max_turns", "Bern is mild.", "none")


async def test_pain_agents_65_unfinished_subagent_is_reported_to_its_parent(scripted: ScriptedModel) -> None:
    """huggingface/smolagents#2287, openai/openai-agents-python#448: limits of nested agents cannot be set."""
    scripted.set_answers([call("expert", {"input": "Bern?"})], [LOOK], "Half of it.", "I see.")
    expert = scripted.agent(name="expert", tools=[look_up], limits=Limits(turns=1))
    outcome = await scripted.agent(tools=[expert.as_tool("expert", "Knows.")]).run("Go.")
    assert outcome.text == "I see."
    assert json.loads(outputs_of(scripted.sent[-1])[0][1]) == {"error": "The agent ended with max_turns: Half of it."}
